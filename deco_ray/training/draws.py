"""The random choices of visits: which patches are kept, which make the pseudo-bags, what seeds the model's dropout.

They depend on keys alone, so they are drawn some visits ahead: on small bags the same code costs three times
as much when every call finds it pushed out of the processor's cache by the step before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deco_ray.errors import ModelError
from deco_ray.keys import generator, torch_seed
from deco_ray.training.bags import reduce_bag, sub_bags
from deco_ray.training.slides import RunSlides
from deco_ray.training.spec import RunSpec
from deco_ray.training.visits import PlannedVisit

AHEAD = 32  # visits


@dataclass(frozen=True)
class Draw:
    seed: int
    patches: int | None = None  # of the slide as the anchors know it; None: the whole bag is trained on
    kept: Tensor | None = None  # patch indices of the reduced bag; None: all
    members: list[Tensor] = field(default_factory=list)  # of each pseudo-bag, as positions in the reduced bag

    def reduced(self, slide_id: str, bag: Tensor) -> Tensor:
        """The bag to train on; the gather is the only copy a visit makes of its features."""
        if self.patches is not None and self.patches != len(bag):
            raise ModelError(
                f"slide {slide_id} has {len(bag)} patches but {self.patches} anchor assignments; "
                "the anchors belong to another cohort, fit them again"
            )
        return bag if self.kept is None else bag.index_select(0, self.kept)


def draws(spec: RunSpec, slides: RunSlides, epoch: int, visits: list[PlannedVisit]) -> Iterator[Draw]:
    for start in range(0, len(visits), AHEAD):
        yield from [draw(spec, slides, epoch, visit) for visit in visits[start : start + AHEAD]]


def draw(spec: RunSpec, slides: RunSlides, epoch: int, visit: PlannedVisit) -> Draw:
    """One visit's choices: DeCo's bags, or the whole bag."""
    seed = torch_seed(*spec.key(epoch, "visit", visit.slide_id, visit.repeat))
    if spec.deco is None:
        return Draw(seed)
    assignment, pseudo = slides.assignments[visit.slide_id], spec.deco.pseudo_bags
    rng = generator(*spec.key(epoch, "bags", visit.slide_id, visit.repeat))
    kept = reduce_bag(assignment, slides.ratios[visit.slide_id], rng)
    members = sub_bags(assignment[kept].astype(np.int64), pseudo.rho, pseudo.m, rng, pseudo.strategy)
    chosen = torch.from_numpy(kept) if len(kept) < len(assignment) else None
    return Draw(seed, len(assignment), chosen, [torch.from_numpy(positions) for positions in members])
