"""The steps of an epoch: fetch a bag, make the visit's bags, one forward, one backward, one optimiser step."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deco_ray.errors import ModelError
from deco_ray.models.protocol import Aggregator, Criterion, Partner
from deco_ray.training.draws import Draw, draws
from deco_ray.training.group import Solo
from deco_ray.training.losses import adjust_logits, log_prior, make_criterion
from deco_ray.training.objective import visit_loss
from deco_ray.training.phases import Phase, learning_rate, planned_visits
from deco_ray.training.slides import RunSlides
from deco_ray.training.spec import RunSpec
from deco_ray.training.visits import PlannedVisit

Features = Iterator[tuple[str, Tensor]]


class Engine:
    """A model with what its epochs need: spec, slides, loss and device."""

    def __init__(self, model: Aggregator, spec: RunSpec, slides: RunSlides, device: torch.device, group: Solo) -> None:
        self.model, self.spec, self.slides, self.device, self.group = model, spec, slides, device, group
        self.criterion: Criterion = make_criterion(spec.training, slides.train_counts)
        self.mixed = spec.training.mixed_precision and device.type == "cuda"
        self.labels = [torch.tensor(label, device=device) for label in range(slides.classes)]
        self.beta = spec.deco.pseudo_bags.beta if spec.deco else 0.0

    def share(self, phase: Phase, epoch: int) -> tuple[list[PlannedVisit], int]:
        """This worker's visits of an epoch, and the steps that all workers take together."""
        visits = planned_visits(self.spec, self.slides, phase, epoch, self.model.needs_partner)
        return visits[self.group.rank :: self.group.size], -(-len(visits) // self.group.size)

    def epoch(
        self,
        phase: Phase,
        epoch: int,
        features: Features,
        optimiser: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        shown: Any,
    ) -> dict[str, Any]:
        """All steps of one epoch; losses stay tensors until its end, so that nothing waits for a number."""
        section, model = self.spec.training, self.model
        lr = learning_rate(section, phase, epoch)
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        for parameter_group in optimiser.param_groups:
            parameter_group["lr"] = lr
        visits, steps = self.share(phase, epoch)
        drawn = draws(self.spec, self.slides, epoch, visits)
        logged: dict[str, list[Tensor]] = defaultdict(list)
        started, waited = time.perf_counter(), 0.0
        model.train()
        for step in range(steps):
            optimiser.zero_grad(set_to_none=True)
            progress = (epoch + step / steps) / self.spec.epochs
            if step < len(visits):  # the last step may have fewer visits than workers
                asked = time.perf_counter()
                bag = self.next_bag(features, visits[step].slide_id)
                other = visits[step].partner
                partner_bag = self.next_bag(features, other) if other else None
                waited += time.perf_counter() - asked
                terms = self.backward(visits[step], next(drawn), bag, partner_bag, progress, scaler)
                for name, value in terms.items():
                    logged[name].append(value)
            self.group.average_gradients(parameters)
            if section.clip_norm is not None:
                scaler.unscale_(optimiser)
                nn.utils.clip_grad_norm_(parameters, section.clip_norm)
            scaler.step(optimiser)
            scaler.update()
            model.after_step(progress)
            if not shown.disable and shown.update():
                shown.set_postfix(loss=f"{logged['loss'][-1].item():.3f}", epoch=epoch + 1, refresh=False)
        seconds = time.perf_counter() - started
        row: dict[str, Any] = {"epoch": epoch, "phase": phase.name, "lr": lr, "visits": len(visits)}
        row |= {name: torch.stack(values).double().mean().item() for name, values in logged.items()}
        if visits and not math.isfinite(row["loss"]):
            raise ModelError(
                f"the loss of {self.spec.model.name}, seed {self.spec.seed}, is {row['loss']} in epoch {epoch}; "
                "lower training.lr or set training.clip_norm"
            )
        return {**row, "seconds": seconds, "wait_seconds": waited}

    def backward(
        self,
        visit: PlannedVisit,
        draw: Draw,
        bag: Tensor,
        partner_bag: Tensor | None,
        progress: float,
        scaler: torch.amp.GradScaler,
    ) -> dict[str, Tensor]:
        """Gradients of one visit, and its loss terms."""
        torch.default_generator.manual_seed(draw.seed)  # torch.manual_seed costs 200 times more
        if self.device.type == "cuda":
            torch.cuda.manual_seed(draw.seed)
        bag = draw.reduced(visit.slide_id, bag).to(self.device)
        members = [positions.to(self.device) for positions in draw.members]
        label = self.labels[self.slides.labels[visit.slide_id]]
        partner = None
        if partner_bag is not None and visit.partner is not None:
            partner = Partner(partner_bag.to(self.device), self.labels[self.slides.labels[visit.partner]])
        with torch.autocast(self.device.type, enabled=self.mixed) if self.mixed else contextlib.nullcontext():
            seen = self.model.visit(bag, label, members, criterion=self.criterion, partner=partner, progress=progress)
            loss, terms = visit_loss(seen, label, self.criterion, self.beta)
        scaler.scale(loss).backward()
        return {"loss": loss.detach(), **terms}

    def next_bag(self, features: Features, slide_id: str) -> Tensor:
        found, bag = next(features)
        assert found == slide_id, f"the source gave slide {found}, the plan says {slide_id}"
        return bag

    @torch.inference_mode()
    def predict(self, features: Features, slide_ids: list[str]) -> Tensor:
        """Logits [n, C] of full bags, on the CPU, after any post-hoc adjustment for class frequency."""
        self.model.eval()
        logits = [self.model(self.next_bag(features, slide).to(self.device)) for slide in slide_ids]
        stacked = torch.stack(logits).float().cpu()
        return adjust_logits(stacked, log_prior(self.slides.train_counts), self.spec.training.post_hoc_tau)
