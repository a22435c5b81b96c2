"""Slides to grade: those of a cohort, or of a folder of feature files that is read where it lies, without a copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from deco_ray.cohort.labels import Classes, check_files, read_labels
from deco_ray.cohort.readers import READERS, Unreadable
from deco_ray.cohort.readers.raw import check_values, printable
from deco_ray.cohort.schema import UNLABELLED
from deco_ray.cohort.sources import Folder, discover
from deco_ray.cohort.store import Cohort, shown, unit_rows
from deco_ray.errors import CohortError

LABELS = "labels.csv"  # looked for in a folder of features


@dataclass(frozen=True)
class CohortSlides:
    cohort: Cohort

    @property
    def where(self) -> str:
        return f"cohort {self.cohort.name} at {shown(self.cohort.uri)}"

    @property
    def dim(self) -> int:
        return self.cohort.dim

    @property
    def encoder(self) -> str | None:
        return self.cohort.meta.encoder

    @property
    def classes(self) -> tuple[str, ...]:
        return self.cohort.classes

    @property
    def rejected(self) -> dict[str, str]:
        return {}

    def sizes(self) -> dict[str, int]:
        """Bytes of features behind each slide, in the order of the cohort."""
        slides = self.cohort.slides
        return dict(zip(slides["slide_id"], (slides["n_patches"] * self.dim * 4).tolist()))

    def labels(self, classes: tuple[str, ...]) -> dict[str, int]:
        slides = self.cohort.slides
        return {slide: int(label) for slide, label in zip(slides["slide_id"], slides["label"]) if label != UNLABELLED}

    def features(self, slide_id: str) -> Tensor:  # [N, d]
        return self.cohort.bag(slide_id).features


@dataclass(frozen=True)
class FolderSlides:
    """CLAM, TRIDENT, STAMP, .pt or .npy files, one a slide."""

    folder: Folder
    dim: int  # of the first file that can be read; any other is refused on its own
    rejected: dict[str, str] = field(default_factory=dict)  # slide id -> why its file cannot even be asked for
    classes: tuple[str, ...] = ()  # a folder states none

    @classmethod
    def open(cls, folder: Folder) -> FolderSlides:
        rejected = {problem.slide_id: f"{problem.file}: {problem.reason}" for problem in check_files(folder.names)}
        why = ""
        for file in folder.files:
            try:
                return cls(folder, READERS[folder.format](file.path).features.shape[1], rejected)
            except (Unreadable, OSError) as error:
                why = why or f"{printable(file.path.name)}: {error}"
        raise CohortError(f"none of the {len(folder.files)} feature files of {folder.root} can be read; {why}")

    @property
    def where(self) -> str:
        return str(self.folder.root)

    @property
    def encoder(self) -> str | None:
        return self.folder.encoder

    @cached_property
    def _paths(self) -> dict[str, Path]:
        return {file.slide_id: file.path for file in self.folder.files}

    def sizes(self) -> dict[str, int]:
        return {slide: path.stat().st_size for slide, path in self._paths.items() if slide not in self.rejected}

    def labels(self, classes: tuple[str, ...]) -> dict[str, int]:
        path = self.folder.root / LABELS
        return read_truth(path, classes) if path.is_file() else {}

    def features(self, slide_id: str) -> Tensor:  # [N, d]
        path = self._paths[slide_id]
        try:
            features = READERS[self.folder.format](path).features
            check_values(features)
        except (Unreadable, OSError) as error:
            raise CohortError(f"slide {slide_id}: {path.name}: {error}") from error
        if features.shape[1] != self.dim:
            raise CohortError(f"slide {slide_id}: {path.name} has {features.shape[1]} dimensions, others {self.dim}")
        return unit_rows(features)


Slides = CohortSlides | FolderSlides


def open_slides(path: str, encoder: str | None = None) -> Slides:
    """A cohort where there is a cohort.json (or a URI), a folder of feature files otherwise."""
    if "://" in path or (Path(path) / "cohort.json").is_file():
        return CohortSlides(Cohort.open(path))
    return FolderSlides.open(discover(path, encoder=encoder))


def read_truth(path: str | Path, classes: tuple[str, ...]) -> dict[str, int]:
    """Slide id -> class from a CSV case_id,slide_id,label; every label must be one of the model's classes."""
    known = Classes(classes)
    truth: dict[str, int] = {}
    for row in read_labels(path):
        index = known.index(row.label)
        if index is None:
            raise CohortError(
                f"{path}: label {row.label!r} of slide {row.slide_id} is not among the model's classes: "
                f"{', '.join(classes)}; mend it, or grade without comparing (--ignore-labels)"
            )
        if truth.setdefault(row.slide_id, index) != index:
            raise CohortError(f"{path}: slide {row.slide_id} has two labels; keep one")
    return truth
