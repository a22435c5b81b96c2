"""Where an experiment takes place: a cohort, one of its splits, and the store for what comes out."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

from deco_ray.artefacts import DIGEST_LENGTH, ArtefactStore, digest, write_atomically
from deco_ray.cohort import Cohort
from deco_ray.cohort.presets import PRESETS
from deco_ray.cohort.splits import Split, describe_groups, frequency_groups, leaks, resolve_split
from deco_ray.cohort.store import shown
from deco_ray.config import Config
from deco_ray.errors import CohortError, ConfigError
from deco_ray.experiments.session import check_storage
from deco_ray.results.tables import Table

TINY_CLASS = 10  # training slides below which a class's figures are mostly chance
NAME_LENGTH = 100  # file systems allow names of 255 bytes


@dataclass(frozen=True)
class Site:
    cohort: Cohort
    split: Split
    store: ArtefactStore
    warnings: tuple[str, ...] = field(default=())

    @property
    def train_counts(self) -> list[int]:
        return self.split.train_counts(self.cohort)

    @property
    def groups(self) -> dict[str, list[int]]:
        return frequency_groups(self.train_counts)

    def explained(self, table: Table) -> Table:
        """The table of scores with a line below that says what its groups are."""
        return replace(table, note=f"{table.note}\n{describe_groups(self.cohort.classes, self.train_counts)}")

    def slide_ids(self) -> list[str]:
        """Every slide a run may read, training first."""
        return [slide for part in ("train", "val", "test") for slide in self.split.ids(part)]


def open_site(config: Config) -> Site:
    """The cohort (synthesised first where the configuration says so and nothing is there), split and store."""
    storage = check_storage(config.storage)
    cohort = open_cohort(config)
    check_paper_dataset(config, cohort)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # leaks are reported once, below, with the other notes
        split = resolve_split(cohort, config.split)
    store = ArtefactStore(storage / folder_name(cohort.name))
    notes = site_warnings(cohort, split) + note_changed_cohort(store.root, cohort)
    return Site(cohort, split, store, tuple(notes))


def open_cohort(config: Config) -> Cohort:
    try:
        return Cohort.open(config.cohort)
    except CohortError:
        missing = "://" not in config.cohort and not Path(config.cohort).exists()
        if config.synthetic is None or not missing:
            raise
        from deco_ray.cohort import synthesize

        section = config.synthetic
        return synthesize(config.cohort, preset=section.preset, scale=section.scale, seed=section.seed)


def check_paper_dataset(config: Config, cohort: Cohort) -> None:
    dataset = config.paper.dataset
    if dataset is None:
        return
    expected = len(PRESETS[dataset].classes)
    if len(cohort.classes) != expected:
        raise ConfigError(
            f"paper.dataset = {dataset!r} has {expected} classes, but the cohort {cohort.name} at "
            f"{shown(config.cohort)} has {len(cohort.classes)}: {', '.join(cohort.classes)}; is this another cohort's "
            "config?"
        )


def site_warnings(cohort: Cohort, split: Split) -> list[str]:
    """What a reader of the results must know about the data."""
    notes = []
    if leaked := leaks(cohort, split):
        notes.append(
            f"{len(leaked)} patients have slides in more than one split, for example {leaked[0]}; "
            "set split.group_by: case_id to keep them together"
        )
    for name, count in zip(cohort.classes, split.train_counts(cohort)):
        if count < TINY_CLASS:
            notes.append(f"class {name} has {count} training slides; its figures are mostly chance")
    return notes


def note_changed_cohort(root: Path, cohort: Cohort) -> list[str]:
    """Say it when the storage holds results of other data under the same cohort name."""
    path = root / "cohort.json"
    known = _known_checksum(path)
    if known == cohort.checksum:
        return []
    write_atomically(path, json.dumps({"uri": shown(cohort.uri), "checksum": cohort.checksum}))
    if not known:
        return []
    return [
        f"cohort {cohort.name} changed since results were last written to {root} (checksum {known[:8]} "
        f"then, {cohort.checksum[:8]} now): everything is computed anew, the old results stay under their own digests"
    ]


def _known_checksum(path: Path) -> str:
    """Of the cohort whose results lie there; empty where the file, which serves a note only, is missing or damaged."""
    try:
        return str(json.loads(path.read_text())["checksum"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def folder_name(name: str) -> str:
    """A cohort's name as one safe folder name; a digest keeps long ones apart that begin alike."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "cohort"
    return safe if len(safe) <= NAME_LENGTH else f"{safe[: NAME_LENGTH - DIGEST_LENGTH - 1]}-{digest(name)}"
