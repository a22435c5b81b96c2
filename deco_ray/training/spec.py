"""What a training run is: everything that decides its numbers, and nothing else."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from deco_ray.artefacts import digest
from deco_ray.config import (
    MaskingSection,
    ModelSection,
    OversamplingSection,
    PseudoBagSection,
    Section,
    TrainingSection,
)
from deco_ray.keys import Part

ENGINE = 1  # raise it when a change to the loop changes weights: finished runs of older engines then keep their names


class DecoSpec(Section):
    """Where the masking ratios of a DeCo run come from, and how its bags and visits are made of them."""

    contributions: str = Field(description="digest of the contribution table")
    anchors: str = Field(description="digest of the anchors")
    masking: MaskingSection = MaskingSection()
    pseudo_bags: PseudoBagSection = PseudoBagSection()
    oversampling: OversamplingSection = OversamplingSection()


class RunSpec(Section):
    """One run: a judge or a method trained plainly (`plain`), or a final model on DeCo's bags (`deco`)."""

    kind: Literal["plain", "deco"] = "plain"
    cohort: str = Field(description="checksum of the cohort")
    split: str = Field(description="digest of the split")
    model: ModelSection = ModelSection()
    training: TrainingSection = TrainingSection()
    seed: int = Field(0, ge=0)
    stage: str = Field("plain", description="judge, final or a method's name: a label, not part of the run")
    threads: int = Field(1, ge=1, description="torch threads: on a CPU they decide the order of sums")
    workers: int = Field(1, ge=1, description="data-parallel workers: so many slides make one step")
    deco: DecoSpec | None = None
    pretrained: str | None = Field(None, description="digest of the run whose weights the method starts from")

    @model_validator(mode="after")
    def _deco_has_bags(self) -> RunSpec:
        if (self.kind == "deco") != (self.deco is not None):
            raise ValueError("a deco run needs its `deco` section, and only a deco run has one")
        return self

    def inputs(self) -> dict[str, Any]:
        inputs = {"engine": ENGINE, **self.model_dump(mode="json", exclude={"stage"})}
        # what a file holds decides the numbers, not what it is called
        paths = {name: Path(value) for name, value in self.model.options.items() if isinstance(value, str)}
        files = {name: sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if path.is_file()}
        return {**inputs, "files": files} if files else inputs

    @property
    def digest(self) -> str:
        return digest(self.inputs())

    def key(self, *parts: Part) -> tuple[Part, ...]:
        """Key of a random draw: judge and final model of one seed never share a draw."""
        return (self.seed, self.kind, *parts)

    @property
    def epochs(self) -> int:
        """All epochs, those that retrain the classifier alone included."""
        return self.training.epochs + self.training.retrain_classifier_epochs
