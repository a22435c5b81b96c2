"""How long the missing stages will take: from finished runs of the same kind, else from a few visits timed here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import torch

from deco_ray.experiments.site import Site
from deco_ray.experiments.stages import Stage, TrainStage
from deco_ray.models import create_model
from deco_ray.models.protocol import Partner
from deco_ray.training.adam import PlainAdam
from deco_ray.training.losses import make_criterion
from deco_ray.training.visits import oversampling_counts

TIMED_VISITS = 4


def estimate_seconds(stages: Iterable[Stage], sites: Mapping[str, Site]) -> float:
    """Seconds of training in one process, one after another; scoring is small beside it and left out."""
    rates: dict[tuple[str, str], float] = {}  # (site, model) -> seconds a visit
    total = 0.0
    for stage in stages:
        if not isinstance(stage, TrainStage):
            continue
        site = sites[stage.site]
        key = (stage.site, stage.spec.model.model_dump_json())
        if key not in rates:
            rates[key] = measured_rate(stage, site) or timed_rate(stage, site)
        total += visits(stage, site) * rates[key]
    return total


def visits(stage: TrainStage, site: Site) -> int:
    """Training visits of a run: slides times repeats times epochs."""
    counts = site.train_counts
    section = stage.spec.deco.oversampling if stage.spec.deco else None
    repeats = oversampling_counts(counts, section.alpha, section.cap) if section else [1] * len(counts)
    return sum(count * times for count, times in zip(counts, repeats)) * stage.spec.epochs


def measured_rate(stage: TrainStage, site: Site) -> float | None:
    """Seconds a visit of finished runs of this model on this cohort; none where there are none."""
    seconds, seen = 0.0, 0
    for record in sorted((site.store.root / "model").glob("*/artefact.json")):
        facts = site.store.record("model", record.parent.name)
        inputs = facts["inputs"]
        same = inputs["split"] == stage.site and inputs["model"] == stage.spec.model.model_dump(mode="json")
        if same and facts.get("train_seconds"):
            spec = stage.spec.model_validate({k: v for k, v in inputs.items() if k != "engine"})
            seconds += facts["train_seconds"]
            seen += visits(TrainStage("", "", spec), site)
    return seconds / seen if seen else None


def timed_rate(stage: TrainStage, site: Site) -> float:
    """Seconds a visit on a slide of mean size, timed in this process."""
    spec, classes = stage.spec, len(site.cohort.classes)
    torch.set_num_threads(spec.threads)
    model = create_model(spec.model.name, site.cohort.dim, classes, **spec.model.options).train()
    slides = site.cohort.slides
    bag = torch.nn.functional.normalize(torch.randn(max(1, int(slides["n_patches"].mean())), site.cohort.dim), dim=1)
    label = torch.tensor(0)
    criterion = make_criterion(spec.training, site.train_counts)
    partner = Partner(bag, label) if model.needs_partner else None
    optimiser = PlainAdam([p for p in model.parameters() if p.requires_grad], fused=True)
    started = time.perf_counter()
    for number in range(TIMED_VISITS + 1):
        if number == 1:
            started = time.perf_counter()  # the first visit warms up
        seen = model.visit(bag, label, criterion=criterion, partner=partner)
        loss = seen.main_weight * criterion(seen.logits[None], label[None]) + sum(seen.extra.values())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    return (time.perf_counter() - started) / TIMED_VISITS
