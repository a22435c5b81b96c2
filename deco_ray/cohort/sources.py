"""Finding the feature files of a folder: which tool wrote it, which file is which slide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deco_ray.cohort.readers import Unreadable, hdf5
from deco_ray.cohort.readers.raw import printable
from deco_ray.cohort.store import local_path
from deco_ray.errors import CohortError

FORMATS = ("auto", "clam", "trident", "stamp", "pt", "npy")
ENDINGS = {"clam": ".h5", "trident": ".h5", "stamp": ".h5", "pt": ".pt", "npy": ".npy"}


@dataclass(frozen=True)
class Source:
    """One slide's feature file."""

    slide_id: str
    path: Path


@dataclass(frozen=True)
class Folder:
    """The feature files of one encoder, sorted by slide id; the order of every later step."""

    format: str
    root: Path
    files: tuple[Source, ...]
    encoder: str | None = None

    @property
    def names(self) -> list[tuple[str, str]]:
        """Slide id and path below the folder of every file, for messages and tables."""
        return [(file.slide_id, printable(file.path.relative_to(self.root))) for file in self.files]


def discover(source: str | Path, format: str = "auto", encoder: str | None = None) -> Folder:
    """The feature files below `source`: a CLAM or TRIDENT output folder, or a folder of files."""
    root = local_path(source, "the source")
    if format not in FORMATS:
        raise CohortError(f"unknown format {format!r}; choose one of {', '.join(FORMATS)}")
    if not root.is_dir():
        raise CohortError(f"no folder {root}; give the folder that holds the feature files")
    for folder, ending, pattern in _places(root, format, encoder):
        paths = sorted(path for path in folder.glob(pattern) if path.suffix.lower() == ending and path.is_file())
        if paths:
            break
    else:
        wanted = ", ".join(sorted(set(ENDINGS.values()) if format == "auto" else {ENDINGS[format]}))
        raise CohortError(f"no feature files ({wanted}) in {root}, its h5_files, pt_files or features_<encoder>")
    found = ending[1:] if ending != ".h5" else format if format != "auto" else _h5_format(paths)
    sources = [Source(printable(path.stem), path) for path in paths]
    files = sorted(sources, key=lambda file: (file.slide_id, file.path.name))
    named = printable(folder.name.removeprefix("features_")) if folder.name.startswith("features_") else None
    return Folder(found, root, tuple(files), encoder or named)


def _places(root: Path, format: str, encoder: str | None) -> Iterator[tuple[Path, str, str]]:
    """Folders to look in, the ending and the pattern to look for; h5 first, because pt has no coordinates.

    Only when the known places hold nothing are all folders below searched (one folder per class, say).
    """
    endings = [".h5", ".pt", ".npy"] if format == "auto" else [ENDINGS[format]]
    encoders = _encoder_folders(root, encoder) if format in ("auto", "trident", "pt") else []
    for ending in endings:
        for folder in (root, root / "h5_files", root / "pt_files", *encoders):
            if folder.is_dir():
                yield folder, ending, "*"
    for ending in endings:
        yield root, ending, "*/**/*"


def _encoder_folders(root: Path, encoder: str | None) -> list[Path]:
    """TRIDENT's features_<encoder>, here or one level below; slide_features_* are no bags."""
    found = sorted(path for pattern in ("features_*", "*/features_*") for path in root.glob(pattern) if path.is_dir())
    if encoder is not None:
        found = [path for path in found if path.name == f"features_{encoder}"] or found
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(root)) for path in found)
        raise CohortError(f"{root} holds several sets of features ({names}); give one of these folders")
    return found


def _h5_format(paths: list[Path]) -> str:
    """Told from the first file that opens; damaged ones are reported with all other problems later."""
    for path in paths:
        try:
            with hdf5.opened(path) as file:
                if hdf5.member(file, "feats") is not None:
                    return "stamp"
                coords = hdf5.member(file, "coords")
                return "trident" if coords is not None and "patch_size_level0" in coords.attrs else "clam"
        except Unreadable:
            continue
    return "clam"
