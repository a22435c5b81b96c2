"""Why this slide: its anchors ranked by what they contribute, patches that show them, one page to read it all on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from deco_ray.artefacts import write_atomically
from deco_ray.cohort.schema import UNLABELLED
from deco_ray.cohort.store import Bag
from deco_ray.counterfactual.effects import Contributions
from deco_ray.counterfactual.ratios import anchor_ratios
from deco_ray.results.report import Picture, Section, Text, Verdict, build_report
from deco_ray.results.slide_maps import Explainer
from deco_ray.results.tables import Column, Table

TOP = 8  # anchors with example patches, and rows on the page; the CSV has all
EXAMPLES = 4  # patches that show an anchor
MEANING = (
    "An anchor is a kind of tissue found by clustering the patches of all training slides. Its contribution E′ to a "
    "class is how much the class's debiased log probability falls when the anchor's patches are replaced by normal "
    "tissue: above zero the tissue speaks for the class, below zero against it. Retention is the share of the "
    "anchor's patches that training on this slide would keep."
)


@dataclass(frozen=True)
class Explanation:
    """One slide's answer; frames are ready to be written."""

    slide_id: str
    label: int | None  # what is known of the slide
    found: Contributions
    anchors: pd.DataFrame  # a row per anchor present, highest contribution first
    examples: pd.DataFrame  # EXAMPLES rows for each of the TOP anchors

    @property
    def predicted(self) -> int:
        """The calibrated prediction (Eq. 6)."""
        return int(self.found.log_probabilities.argmax())

    @property
    def probabilities(self) -> np.ndarray:  # [C]
        return np.exp(self.found.log_probabilities)


def explain_slide(explainer: Explainer, bag: Bag, classes: Sequence[str], normal_class: int = 0) -> Explanation:
    """Contributions to the slide's label, or to its predicted class where it has none; needs no coordinates."""
    label = None if bag.label == UNLABELLED else bag.label
    found = explainer.contributions(bag, label)
    anchors = anchor_frame(explainer, bag, found, classes)
    if label == normal_class:
        anchors["retention"] = 1.0  # normal slides are never masked
    return Explanation(
        bag.slide_id, label, found, anchors, example_frame(explainer, bag, anchors["anchor"].head(TOP).tolist())
    )


def anchor_frame(explainer: Explainer, bag: Bag, found: Contributions, classes: Sequence[str]) -> pd.DataFrame:
    """anchor, patches, share, effect_<class> (E', Eq. 7), score (Eq. 8), retention (1 - r), attention (mean)."""
    scores = found.scores(explainer.masking.lam)
    ratios = anchor_ratios(
        explainer.masking, scores, found.counts, found.attention, explainer.seed, bag.slide_id
    )  # Eq. 9
    frame = pd.DataFrame(
        {
            "anchor": found.anchors,
            "patches": found.counts,
            "share": found.counts / found.counts.sum(),
            **{f"effect_{name}": found.effects[:, index] for index, name in enumerate(classes)},
            "score": scores,
            "retention": 1.0 - ratios,
            "attention": found.attention,
        }
    )
    order = np.argsort(-found.effects[:, found.label], kind="stable")
    return frame.iloc[order].reset_index(drop=True)


def example_frame(explainer: Explainer, bag: Bag, anchors: Sequence[int]) -> pd.DataFrame:
    """The patches of the slide nearest to each anchor: anchor, patch (its row), x, y, cosine, attention."""
    assignment = explainer.anchors.assign(bag.features)
    attention = explainer.attention(bag)
    features = bag.features.numpy()
    rows: list[dict[str, Any]] = []
    for anchor in anchors:
        members = np.flatnonzero(assignment == anchor)
        cosines = features[members] @ explainer.anchors.anchors[anchor]
        for place in np.argsort(-cosines, kind="stable")[:EXAMPLES]:
            patch = int(members[place])
            x, y = (None, None) if bag.coords is None else map(int, bag.coords[patch])
            cosine, weight = float(cosines[place]), float(attention[patch])
            rows.append({"anchor": int(anchor), "patch": patch, "x": x, "y": y, "cosine": cosine, "attention": weight})
    return pd.DataFrame(rows, columns=["anchor", "patch", "x", "y", "cosine", "attention"])


def headline(answer: Explanation, classes: Sequence[str]) -> str:
    """Prediction, label and rival in one sentence."""
    likely = answer.probabilities
    text = f"Calibrated prediction: {classes[answer.predicted]} ({likely[answer.predicted]:.0%})."
    if answer.label is not None:
        text += f" Labelled {classes[answer.label]} ({likely[answer.label]:.0%})."
    rival = answer.found.rival
    return f"{text} Explained: {classes[answer.found.label]}, against its rival {classes[rival]} ({likely[rival]:.0%})."


def write_tables(answer: Explanation, folder: Path) -> None:
    """<slide>.anchors.csv and <slide>.examples.csv."""
    write_atomically(folder / f"{answer.slide_id}.anchors.csv", answer.anchors.to_csv(index=False))
    write_atomically(folder / f"{answer.slide_id}.examples.csv", answer.examples.to_csv(index=False))


def write_page(
    answer: Explanation,
    classes: Sequence[str],
    folder: Path,
    provenance: Mapping[str, Any],
    settings: str,
    picture: Path | None,
    refusal: str | None = None,
) -> Path:
    """<slide>.html: the grade, the anchors, their examples and the heatmap, or why there is none."""
    slide = answer.slide_id
    where: list[Any] = [Text(refusal or "No heatmap was drawn.")]
    if picture is not None:
        files = [f"{slide}{ending}" for ending in (".png", ".pdf", ".geojson", ".parquet")]
        where = [Picture(picture, f"Slide {slide}: anchors, contribution, retention, attention", files)]
    sections = [
        Section("What the model says", [Verdict(headline(answer, classes)), probability_table(answer, classes)]),
        Section("Where it lies", where),
        Section("What it rests on", [Text(MEANING), anchor_table(answer, classes)]),
        Section("Patches that show these anchors", [example_table(answer)]),
    ]
    notes = [refusal] if refusal else []
    return build_report(folder / f"{slide}.html", f"Why slide {slide}", sections, provenance, settings, notes)


def probability_table(answer: Explanation, classes: Sequence[str]) -> Table:
    rows = [[name, float(p)] for name, p in zip(classes, answer.probabilities)]
    return Table((Column("Class"), Column("Calibrated probability", digits=3)), rows)


def anchor_table(answer: Explanation, classes: Sequence[str]) -> Table:
    columns = (
        Column("Anchor"),
        Column("Patches"),
        *(Column(name, digits=3, group="contribution E′ to") for name in classes),
        Column("Retention"),
        Column("Attention"),
    )
    total = int(answer.found.counts.sum())
    rows = [
        [f"{int(row['anchor'])}", int(row["patches"])]
        + [float(row[f"effect_{name}"]) for name in classes]
        + [float(row["retention"]), float(row["attention"]) * total]
        for _, row in answer.anchors.head(TOP).iterrows()
    ]
    note = f"The {len(rows)} of {len(answer.anchors)} anchors present that contribute most to the explained class; "
    note += "attention is that of a patch, as a multiple of the uniform share."
    return Table(columns, rows, f"Anchors, highest contribution to {classes[answer.found.label]} first", note)


def example_table(answer: Explanation) -> Table:
    columns = (Column("Anchor"), Column("Patch"), Column("x"), Column("y"), Column("Cosine", digits=3))
    frame = answer.examples
    rows = [
        [f"{anchor}", int(patch), None if x is None else int(x), None if y is None else int(y), float(cosine)]
        for anchor, patch, x, y, cosine in zip(
            frame["anchor"], frame["patch"], _cells(frame["x"]), _cells(frame["y"]), frame["cosine"]
        )
    ]
    note = "The patches nearest to each anchor; x and y are the top-left corner in level-0 pixels."
    return Table(columns, rows, note=note)


def _cells(column: pd.Series) -> list[int | None]:
    return [None if pd.isna(value) else int(value) for value in column]
