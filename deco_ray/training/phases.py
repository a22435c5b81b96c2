"""A run in phases: training, and for decoupled training (cRT) the classifier alone afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from deco_ray.config import TrainingSection
from deco_ray.models.protocol import Aggregator
from deco_ray.training.slides import RunSlides
from deco_ray.training.spec import RunSpec
from deco_ray.training.visits import PlannedVisit, epoch_visits, oversampling_counts


@dataclass(frozen=True)
class Phase:
    name: str
    first: int  # epochs first … end - 1; numbers are the run's own, so that every draw has one key
    end: int

    @property
    def classifier_only(self) -> bool:
        return self.name == "classifier"


def phases(section: TrainingSection) -> list[Phase]:
    train = Phase("train", 0, section.epochs)
    if not section.retrain_classifier_epochs:
        return [train]
    return [train, Phase("classifier", section.epochs, section.epochs + section.retrain_classifier_epochs)]


def learning_rate(section: TrainingSection, phase: Phase, epoch: int) -> float:
    """Of one epoch: linear warm-up, then constant or a half cosine to zero over the phase."""
    done, warmup = epoch - phase.first, 0 if phase.classifier_only else section.warmup_epochs
    if done < warmup:
        return section.lr * (done + 1) / (warmup + 1)
    if section.schedule == "constant":
        return section.lr
    length = max(phase.end - phase.first - warmup, 1)
    return section.lr * 0.5 * (1 + math.cos(math.pi * (done - warmup) / length))


def trainable(model: Aggregator, phase: Phase) -> list[nn.Parameter]:
    """The parameters of a phase; those that the classifier phase leaves alone are frozen."""
    if phase.classifier_only:
        chosen = {id(parameter) for parameter in model.classifier_parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def restart_classifier(model: Aggregator, initial: dict[str, Tensor], best: dict[str, Tensor]) -> None:
    """Best representation so far with the classifier as it was before training (cRT learns it anew)."""
    chosen = {id(parameter) for parameter in model.classifier_parameters()}
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in chosen]
    model.load_state_dict({**best, **{name: initial[name] for name in names}})


def planned_visits(spec: RunSpec, slides: RunSlides, phase: Phase, epoch: int, partners: bool) -> list[PlannedVisit]:
    """An epoch's visits: oversampled for DeCo (Eq. 12), resampled as configured otherwise, balanced for cRT."""
    resampling = "balanced" if phase.classifier_only else spec.training.resampling
    repeats = None
    if spec.deco is not None and not phase.classifier_only:
        resampling = "none"
        repeats = oversampling_counts(slides.train_counts, spec.deco.oversampling.alpha, spec.deco.oversampling.cap)
    return epoch_visits(
        slides.train,
        slides.labels,
        key=spec.key(epoch),
        repeats=repeats,
        resampling=resampling,
        partners=partners,
    )


def needed_slides(plans: Iterator[list[PlannedVisit]], val: list[str]) -> Iterator[str]:
    """Every slide a phase will read, in order: the plan is known ahead, so a stream can run ahead of the training."""
    for visits in plans:
        for visit in visits:
            yield visit.slide_id
            if visit.partner is not None:
                yield visit.partner
        yield from val
