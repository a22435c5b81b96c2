"""Trained models that grade slides together: all of one class list and one encoder, each with its own prior."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deco_ray.errors import ModelError
from deco_ray.models.protocol import Aggregator
from deco_ray.models.saved import load_model, slide_mark
from deco_ray.training.losses import adjust_logits, log_prior


@dataclass(frozen=True)
class Member:
    """One model and what is taken from its logits: τ · log prior, [C]; none when τ = 0."""

    model: Aggregator
    facts: dict[str, Any]
    correction: Tensor | None

    def probabilities(self, features: Tensor) -> Tensor:  # [N, d] -> float64 [C]
        logits = self.model(features)
        if self.correction is not None:
            logits = logits - self.correction
        return logits.double().softmax(-1)


@dataclass(frozen=True)
class Ensemble:
    """One or more models, on the CPU; picklable, so that workers need no access to the models' folders."""

    members: tuple[Member, ...]

    @classmethod
    def load(cls, folders: Sequence[str | Path], calibrate: float | None = None) -> Ensemble:
        """Every model read and checked against the first; `calibrate` replaces each run's own post-hoc τ."""
        if not folders:
            raise ModelError("no model is given")
        members = []
        for folder in folders:
            model, facts = load_model(folder)
            members.append(Member(model, facts, _correction(facts, calibrate, folder)))
            _check_alike(members[0].facts, facts, folders[0], folder)
        return cls(tuple(members))

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.members[0].facts["classes"])

    @property
    def dim(self) -> int:
        return int(self.members[0].facts["dim"])

    @property
    def encoder(self) -> str | None:
        """The first that a model names."""
        return next((encoder for member in self.members if (encoder := member.facts.get("encoder"))), None)

    def seen(self, slide_ids: Iterable[str]) -> set[str]:
        """Those of the slides that any model was trained on or chosen by, of the models that say."""
        marks = {mark for member in self.members for mark in member.facts.get("seen_slides", ())}
        return {slide for slide in slide_ids if slide_mark(slide) in marks}

    @property
    def says_seen(self) -> bool:
        return all("seen_slides" in member.facts for member in self.members)

    def probabilities(self, features: Tensor) -> np.ndarray:  # [N, d] -> [M, C]
        with torch.inference_mode():
            return torch.stack([member.probabilities(features) for member in self.members]).numpy()

    def check(self, dim: int, encoder: str | None, classes: Sequence[str], where: str) -> None:
        """Refuse features these models cannot grade; `classes` are those of the labels, empty without labels."""
        if dim != self.dim:
            raise ModelError(
                f"the model was trained on {self.dim}-dimensional features (encoder {self.encoder or 'not stated'}), "
                f"those of {where} have {dim} (encoder {encoder or 'not stated'}); use features of the same encoder"
            )
        if not same_encoder(encoder, self.encoder):
            raise ModelError(
                f"the model was trained on features of encoder {self.encoder!r}, {where} has those of {encoder!r}; "
                f"use features of the same encoder. If it is the same under another name: --encoder {self.encoder}"
            )
        if classes and tuple(classes) != self.classes:
            raise ModelError(
                f"the model's classes are {', '.join(self.classes)}; those of {where} are {', '.join(classes)}. "
                "Grade it without comparing (--ignore-labels), or use a model of the same class list"
            )


def same_encoder(one: str | None, other: str | None) -> bool:
    """False only when both are known and differ in more than case and separators."""
    if not one or not other:
        return True
    return "".join(filter(str.isalnum, one.lower())) == "".join(filter(str.isalnum, other.lower()))


def _correction(facts: dict[str, Any], calibrate: float | None, folder: str | Path) -> Tensor | None:
    """As in the run's own evaluation, unless another τ is asked for."""
    tau = float(facts.get("post_hoc_tau") or 0.0) if calibrate is None else calibrate
    if not tau:
        return None
    counts = facts.get("train_counts")
    if not counts or len(counts) != len(facts["classes"]):
        raise ModelError(
            f"the model at {folder} does not say its training counts, so there is no prior to calibrate by"
        )
    return -adjust_logits(torch.zeros(len(counts)), log_prior(counts), tau)


def _check_alike(first: dict[str, Any], other: dict[str, Any], one: str | Path, two: str | Path) -> None:
    if list(first["classes"]) != list(other["classes"]):
        raise ModelError(
            f"the models have different classes: {', '.join(first['classes'])} at {one}, "
            f"{', '.join(other['classes'])} at {two}; an ensemble needs one class list"
        )
    if first["dim"] != other["dim"] or not same_encoder(first.get("encoder"), other.get("encoder")):
        raise ModelError(
            f"the models were trained on different features: {first['dim']} dimensions of {first.get('encoder')} at "
            f"{one}, {other['dim']} of {other.get('encoder')} at {two}; grade with each on its own"
        )
