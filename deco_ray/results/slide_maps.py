"""What a judge says of every patch of one slide, ready to be drawn: anchor, contribution, retention, attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deco_ray.anchors import Anchors
from deco_ray.cohort import Bag, Cohort
from deco_ray.config import CounterfactualSection, MaskingSection
from deco_ray.counterfactual.effects import Contributions
from deco_ray.counterfactual.explain import explain_bag
from deco_ray.counterfactual.ratios import anchor_ratios
from deco_ray.models.protocol import Aggregator
from deco_ray.results.heatmaps import SlideMaps


@dataclass(frozen=True)
class Explainer:
    """A model, its anchors and the settings its contributions are read with."""

    model: Aggregator
    anchors: Anchors
    log_prior: np.ndarray  # [C]
    counterfactual: CounterfactualSection
    masking: MaskingSection
    seed: int = 0

    def contributions(self, bag: Bag, label: int | None = None) -> Contributions:
        """Of the label, or of the calibrated prediction when there is none."""
        section = self.counterfactual
        return explain_bag(
            self.model, bag.features, self.anchors, self.log_prior, section.tau, section.construction, label
        )

    def attention(self, bag: Bag) -> np.ndarray:  # [N]
        like = next(self.model.parameters())
        with torch.inference_mode():
            return self.model.attention(bag.features.to(like)).float().cpu().numpy()

    def maps(
        self,
        cohort: Cohort,
        bag: Bag,
        found: Contributions,
        *,
        image: str | Path | None = None,
        annotation: str | Path | None = None,
        title: str = "",
    ) -> SlideMaps:
        """The slide's values patch by patch; slides labelled normal keep everything and have no contributions."""
        assignment = self.anchors.assign(bag.features)
        place = np.searchsorted(found.anchors, assignment)  # of each patch's anchor among those present
        normal = bag.label == cohort.meta.normal_class
        scores = found.scores(self.masking.lam)
        ratios = anchor_ratios(self.masking, scores, found.counts, found.attention, self.seed, bag.slide_id)
        row = cohort.row(bag.slide_id)
        size, width, height = (known(row[key]) for key in ("patch_size_level0", "level0_width", "level0_height"))
        return SlideMaps(
            slide_id=bag.slide_id,
            coords=bag.coords,
            assignment=assignment,
            contribution=None if normal else found.effects[:, found.label][place],
            retention=np.ones(len(place)) if normal else 1.0 - ratios[place],
            attention=self.attention(bag),
            patch_size=size,
            level0=(int(width), int(height)) if width and height else None,
            title=title,
            image=image,
            annotation=annotation,
        )


def known(value: float | None) -> float | None:
    """Empty cells of slides.parquet arrive as NaN."""
    return None if value is None or not np.isfinite(value) else float(value)
