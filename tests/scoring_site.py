"""A split, anchors and an untrained judge on disk: all that scoring needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deco_ray.anchors.artefact import Anchors
from deco_ray.anchors.assignments import write_assignments
from deco_ray.artefacts import ArtefactStore
from deco_ray.cohort.splits import Split, new_split
from deco_ray.cohort.store import Cohort
from deco_ray.config import CounterfactualSection
from deco_ray.counterfactual.slide_scorer import ScoringJob
from deco_ray.models import create_model

K = 8


@dataclass(frozen=True)
class Site:
    cohort: Cohort
    split: Split
    store: ArtefactStore
    anchors: Path
    judge: Path

    @property
    def slides(self) -> list[str]:
        normal = self.cohort.meta.normal_class
        return [slide for slide in self.split.ids("train") if self.cohort.row(slide)["label"] != normal]

    def job(self, work: Path, section: CounterfactualSection | None = None) -> ScoringJob:
        counts = tuple(self.split.train_counts(self.cohort))
        section = section or CounterfactualSection()
        return ScoringJob(self.cohort.uri, self.cohort.checksum, self.anchors, self.judge, section, counts, work)


def make_site(cohort: Cohort, folder: Path, model: str = "abmil", **options) -> Site:
    split = new_split(cohort, "all", dict.fromkeys(cohort.slides["slide_id"], "train"), {"made_by": "test"})
    store = ArtefactStore(folder / "store")
    anchors, judge = folder / "anchors" / "a1", folder / "model" / "j1"
    anchors.mkdir(parents=True)
    judge.mkdir(parents=True)
    rng = np.random.default_rng(0)
    features = np.concatenate([cohort.bag(slide).features.numpy() for slide in split.ids("train")])
    found = Anchors.of(features[rng.permutation(len(features))[:K]], features[rng.permutation(len(features))[:3]])
    found.save(anchors)
    bags = (cohort.bag(slide) for slide in split.ids("train"))
    write_assignments(anchors, K, ((bag.slide_id, bag.label, found.assign(bag.features)) for bag in bags))
    torch.manual_seed(0)
    network = create_model(model, cohort.dim, len(cohort.classes), **options)
    torch.save(network.state_dict(), judge / "model.pt")
    facts = {"name": model, "options": options, "dim": cohort.dim, "classes": list(cohort.classes)}
    (judge / "model.json").write_text(json.dumps(facts))
    return Site(cohort, split, store, anchors, judge)
