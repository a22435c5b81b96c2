"""How well contributions and attention find the patches that carry the lesion, where those are known.

Slides are judged one by one, since scores of different slides are not comparable, and averaged per class.
Positives are patches of the slide's own class; patches of another lesion count neither way.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import no_grad

from deco_ray.anchors.artefact import Anchors
from deco_ray.cohort.store import Bag, Cohort, locate, shown
from deco_ray.counterfactual.explain import explain_bag
from deco_ray.counterfactual.replacements import Construction
from deco_ray.errors import CohortError
from deco_ray.models.protocol import Aggregator

LESIONS = "instances/lesions.parquet"
WAYS = ("contribution", "score", "attention")  # E'ʸ of the patch's anchor, its s, the patch's own attention
MEASURES = tuple(f"{way}_{measure}" for way in WAYS for measure in ("auroc", "ap"))


def load_instances(cohort: Cohort, path: str | Path | None = None) -> dict[str, np.ndarray]:
    """The lesion class of every patch, int64 [N], 0 where normal: a synthetic cohort's own, or an .npz by slide id."""
    sizes = dict(zip(cohort.slides["slide_id"], cohort.slides["n_patches"].astype(int)))
    if path is not None:
        try:
            with np.load(path, allow_pickle=False) as saved:
                instances = {slide: saved[slide].astype(np.int64) for slide in saved.files if slide in sizes}
        except (OSError, EOFError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise CohortError(
                f"cannot read {path}: {error}; report.instances takes an .npz with a whole number for every patch, "
                "by slide id, as numpy.savez writes it"
            ) from error
        for slide, lesion in instances.items():
            if lesion.shape != (sizes[slide],):
                raise CohortError(f"{path}: slide {slide} has {lesion.size} entries for {sizes[slide]} patches")
        return instances
    filesystem, root = locate(cohort.uri)
    try:
        with filesystem.open_input_file(f"{root}/{LESIONS}") as file:
            table = pq.read_table(file).to_pandas()
    except FileNotFoundError:
        raise CohortError(f"{shown(cohort.uri)} has no {LESIONS}: its lesion patches are not known") from None
    instances = {slide: np.zeros(size, dtype=np.int64) for slide, size in sizes.items()}
    for slide, rows in table.groupby("slide_id"):
        instances[str(slide)][rows["patch"].to_numpy()] = rows["lesion"].to_numpy()
    return instances


def instances_checksum(cohort: Cohort, path: str | None) -> str | None:
    """What an .npz of lesions holds, in short, once all of it was read; none where none is given."""
    if path is None:
        return None
    load_instances(cohort, path)  # a file that cannot be used is told before hours of work are spent
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Localiser:
    """What is measured of one slide; picklable, so that it can travel to wherever bags are read."""

    model: Aggregator
    anchors: Anchors
    log_prior: np.ndarray
    tau: float = 1.0
    construction: Construction = "normal"
    lam: float = 0.6

    def __call__(self, bag: Bag, lesion: np.ndarray) -> dict[str, float] | None:
        """AUROC and average precision of each way, or none for a slide without both kinds of patches."""
        counted = (lesion == bag.label) | (lesion == 0)
        positive = lesion[counted] == bag.label
        if not 0 < positive.sum() < len(positive):
            return None
        found = explain_bag(
            self.model, bag.features, self.anchors, self.log_prior, self.tau, self.construction, bag.label
        )
        position = np.searchsorted(found.anchors, self.anchors.assign(bag.features))
        like = next(self.model.parameters())
        with no_grad():
            attention = self.model.attention(bag.features.to(like)).double().cpu().numpy()
        ways = (found.effects[:, bag.label][position], found.scores(self.lam)[position], attention)
        values = [
            float(measure(positive, scores[counted]))
            for scores in ways
            for measure in (roc_auc_score, average_precision_score)
        ]
        return {**dict(zip(MEASURES, values)), "lesion_share": float(positive.mean())}


def localise(
    cohort: Cohort, slide_ids: Iterable[str], instances: Mapping[str, np.ndarray], localiser: Localiser
) -> pd.DataFrame:
    """One row per slide of a lesion class: its measures, and the share of lesion patches (the AP of chance)."""
    rows = []
    for slide in slide_ids:
        label = int(cohort.row(slide)["label"])
        if label == cohort.meta.normal_class or slide not in instances:
            continue
        measured = localiser(cohort.bag(slide), instances[slide])
        if measured is not None:
            rows.append({"slide_id": slide, "label": label, **measured})
    return pd.DataFrame(rows, columns=["slide_id", "label", *MEASURES, "lesion_share"])


def by_class(slides: pd.DataFrame, classes: Sequence[str]) -> pd.DataFrame:
    """Means over the slides of each class present, and over all slides in the last row."""
    numbers = [*MEASURES, "lesion_share"]
    rows = [
        {"class": classes[label], "slides": len(group), **group[numbers].mean()}
        for label, group in ((label, slides[slides["label"] == label]) for label in range(len(classes)))
        if len(group)
    ]
    if len(slides):
        rows.append({"class": "all", "slides": len(slides), **slides[numbers].mean()})
    return pd.DataFrame(rows, columns=["class", "slides", *numbers])
