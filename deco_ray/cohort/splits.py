"""Splits: class-balanced validation and test quotas first, then the long tail on what remains (supplement, section A).

A split is stored with its cohort as splits/<name>.parquet; the file remembers how it was made and for which data.
"""

from __future__ import annotations

import functools
import io
import json
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from deco_ray.artefacts import digest, write_atomically
from deco_ray.cohort.schema import SPLIT, SPLIT_NAMES, UNLABELLED
from deco_ray.cohort.store import Cohort, locate
from deco_ray.config import SplitSection
from deco_ray.errors import CohortError
from deco_ray.keys import generator

METADATA_KEY = b"deco_ray"  # of the Parquet schema; holds JSON
FEW_SLIDES, MANY_SLIDES = 20, 100  # bounds of Tail and Head when some class is that small


@dataclass(frozen=True)
class Split:
    """Which labelled slide is for what; `assignment` is in the cohort's order, metadata says how it was made."""

    name: str
    assignment: Mapping[str, str]  # slide_id -> train, val, test or unused
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def ids(self, part: str) -> list[str]:
        """Slide ids of train, val, test or unused, in the cohort's order."""
        if part not in SPLIT_NAMES:
            raise CohortError(f"a split has {', '.join(SPLIT_NAMES)}; not {part!r}")
        return [slide for slide, assigned in self.assignment.items() if assigned == part]

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the slides of each part and the data behind them; not the name."""
        return digest({"assignment": dict(self.assignment), "cohort": self.metadata["cohort"]})

    def counts(self, cohort: Cohort, part: str) -> list[int]:
        """Slides of each class in one part."""
        label_of = dict(zip(cohort.slides["slide_id"], cohort.slides["label"]))
        found = Counter(int(label_of[slide]) for slide in self.ids(part))
        return [found[label] for label in range(len(cohort.classes))]

    def train_counts(self, cohort: Cohort) -> list[int]:
        return self.counts(cohort, "train")


def long_tail_counts(pool_sizes: Sequence[int], imbalance_ratio: float) -> list[int]:
    """Training slides to keep of each class, pools ordered head to tail: n_max (1/IR)^(r/(C-1)), at most the pool."""
    if imbalance_ratio < 1:
        raise CohortError(f"imbalance ratio {imbalance_ratio} is below 1; it is head slides over tail slides")
    last = max(1, len(pool_sizes) - 1)
    # the small term keeps exact targets exact: 1000 / 10 must floor to 100, whatever the power rounds to
    targets = [math.floor(pool_sizes[0] * imbalance_ratio ** (-rank / last) + 1e-9) for rank in range(len(pool_sizes))]
    return [min(target, pool) for target, pool in zip(targets, pool_sizes)]


def frequency_groups(train_counts: Sequence[int]) -> dict[str, list[int]]:
    """Class indices of Head, Medium and Tail, each by decreasing frequency (supplement A, adaptive protocol)."""
    ranked = sorted(range(len(train_counts)), key=lambda label: -train_counts[label])  # stable: ties by class index
    if min(train_counts) < FEW_SLIDES:
        head = [label for label in ranked if train_counts[label] > MANY_SLIDES]
        tail = [label for label in ranked if train_counts[label] < FEW_SLIDES]
        return {"head": head, "medium": [c for c in ranked if c not in head and c not in tail], "tail": tail}
    third, remainder = divmod(len(ranked), 3)
    first = third + (remainder > 0)
    second = first + third + (remainder > 1)
    return {"head": ranked[:first], "medium": ranked[first:second], "tail": ranked[second:]}


def realised_ratio(train_counts: Sequence[int]) -> float:
    """IR = n_max / n_min of the training slides there are."""
    return max(train_counts) / min(train_counts) if min(train_counts) else math.inf


def make_split(cohort: Cohort, section: SplitSection) -> Split:
    """The split of the section's keys; the same for any order of rows, its val and test the same for any ratio."""
    slides = cohort.slides[cohort.slides["label"] != UNLABELLED]
    _check_quotas(cohort, slides, section)
    cases = _cases(slides, section.group_by)  # a slide is its own case unless grouped
    holding: list[list[str]] = [[] for _ in cohort.classes]  # cases with a slide of the class
    for case in sorted(cases):
        for label in {label for _, label in cases[case]}:
            holding[label].append(case)
    queues = [_shuffled(found, section.seed, "quotas", label) for label, found in enumerate(holding)]
    free = set(cases)
    val = _reserve(section.val_per_class, "validation", cohort, queues, cases, free)
    test = _reserve(section.test_per_class, "test", cohort, queues, cases, free)
    pool: list[list[str]] = [[] for _ in cohort.classes]
    for case in sorted(free):
        for slide, label in cases[case]:
            pool[label].append(slide)
    pools = [_shuffled(slides_left, section.seed, "long tail", label) for label, slides_left in enumerate(pool)]
    train = _long_tail(cohort, pools, section)
    part_of = dict.fromkeys(val, "val") | dict.fromkeys(test, "test") | dict.fromkeys(train, "train")
    settings = section.model_dump(mode="json", exclude={"name"})
    ratio = "natural" if section.imbalance_ratio is None else f"ir{section.imbalance_ratio:g}"
    return new_split(cohort, section.name or f"{ratio}_seed{section.seed}", part_of, {"made_by": "quotas", **settings})


def new_split(cohort: Cohort, name: str, part_of: Mapping[str, str], metadata: Mapping[str, Any]) -> Split:
    """A split of this cohort from any assignment; slides not mentioned are unused, unlabelled ones left out."""
    _check_name(name)
    labels = dict(zip(cohort.slides["slide_id"], cohort.slides["label"]))
    unknown = [slide for slide in part_of if slide not in labels]
    if unknown:
        raise CohortError(f"split {name}: {len(unknown)} slides are not in cohort {cohort.name}, first {unknown[0]!r}")
    for slide, part in part_of.items():
        if part not in SPLIT_NAMES:
            raise CohortError(f"split {name}: slide {slide} is in {part!r}, not one of {', '.join(SPLIT_NAMES)}")
        if labels[slide] == UNLABELLED and part != "unused":
            raise CohortError(f"split {name}: slide {slide} is in {part!r} but has no label")
    assignment = {slide: part_of.get(slide, "unused") for slide, label in labels.items() if label != UNLABELLED}
    return Split(name, assignment, {**metadata, "cohort": cohort.checksum})


def _check_name(name: str) -> None:
    """A split's name is its file's name, so it must stay in its folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) or ".." in name:
        raise CohortError(
            f"split name {name!r}: use letters, digits, '.', '_' and '-', starting with a letter or digit"
        )


def leaks(cohort: Cohort, split: Split) -> list[str]:
    """One line for each patient with slides in more than one of train, val and test."""
    parts: dict[str, dict[str, str]] = defaultdict(dict)
    for slide, case in zip(cohort.slides["slide_id"], cohort.slides["case_id"]):
        part = split.assignment.get(slide, "unused")
        if part != "unused" and pd.notna(case) and case:
            parts[str(case)].setdefault(part, slide)
    return [
        f"case {case}: " + ", ".join(f"{slide} in {part}" for part, slide in sorted(found.items()))
        for case, found in parts.items()
        if len(found) > 1
    ]


def save_split(cohort: Cohort, split: Split, overwrite: bool = False) -> str:
    """Write splits/<name>.parquet beside the cohort and return where; another split of that name is kept."""
    filesystem, root = locate(cohort.uri)
    path = f"{root}/splits/{split.name}.parquet"
    if not overwrite and filesystem.get_file_info(path).type == fs.FileType.File:
        if load_split(cohort, split.name).digest == split.digest:
            return path
        raise CohortError(f"{path} holds another split; choose another name or ask to overwrite it")
    table = pa.table([list(split.assignment), list(split.assignment.values())], schema=SPLIT)
    text = json.dumps(dict(split.metadata), sort_keys=True).encode()
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: text}), buffer)
    try:
        if isinstance(filesystem, fs.LocalFileSystem):
            write_atomically(path, buffer.getvalue())
        else:
            with filesystem.open_output_stream(path) as file:  # an object appears only when complete
                file.write(buffer.getvalue())
    except OSError as error:
        raise CohortError(f"cannot write split {path}: {error}") from error
    return path


def load_split(cohort: Cohort, name: str) -> Split:
    """The stored split, refused if the cohort's slides, labels or features changed since it was made."""
    _check_name(name)
    filesystem, root = locate(cohort.uri)
    path = f"{root}/splits/{name}.parquet"
    try:
        with filesystem.open_input_file(path) as file:
            table = pq.read_table(io.BytesIO(file.read()), columns=SPLIT.names)
    except FileNotFoundError:
        known = ", ".join(split_names(cohort)) or "none"
        raise CohortError(f"cohort {cohort.name} has no split {name!r}; stored: {known}") from None
    except (OSError, pa.ArrowException) as error:
        raise CohortError(f"cannot read split {path}: {error}; make it again with `deco-ray split`") from error
    metadata = _metadata(table, path)
    made_for = metadata.pop("cohort", None)
    if made_for is not None and made_for != cohort.checksum:
        raise CohortError(
            f"split {name!r} was made for other data (checksum {made_for[:8]}, now {cohort.checksum[:8]}): "
            f"the cohort at {cohort.uri} has changed; make the split again with `deco-ray split`"
        )
    return new_split(cohort, name, dict(zip(*(table[column].to_pylist() for column in SPLIT.names))), metadata)


def _metadata(table: pa.Table, path: str) -> dict[str, Any]:
    """What the file says about itself; a table made elsewhere may say nothing."""
    try:
        return dict(json.loads((table.schema.metadata or {}).get(METADATA_KEY, b"{}")))
    except ValueError as error:
        raise CohortError(f"split {path} has damaged metadata: {error}; make it again with `deco-ray split`") from error


def split_names(cohort: Cohort) -> list[str]:
    """Names of the stored splits."""
    filesystem, root = locate(cohort.uri)
    files = filesystem.get_file_info(fs.FileSelector(f"{root}/splits", allow_not_found=True))
    return sorted(file.base_name.removesuffix(".parquet") for file in files if file.extension == "parquet")


def resolve_split(cohort: Cohort, section: SplitSection) -> Split:
    """The split a configuration asks for: the stored one it names, else the one its keys make; warns of leaks."""
    split = load_split(cohort, section.name) if section.name else make_split(cohort, section)
    found = leaks(cohort, split)
    if found:
        warnings.warn(
            f"split {split.name}: {len(found)} patients have slides in more than one part ({found[0]}); "
            "split.group_by=case_id keeps patients together",
            stacklevel=2,
        )
    return split


def _shuffled(items: list[str], seed: int, purpose: str, label: int) -> list[str]:
    return [items[index] for index in generator(seed, "split", purpose, label).permutation(len(items))]


def _cases(slides: pd.DataFrame, group_by: str | None) -> dict[str, list[tuple[str, int]]]:
    """Case -> its (slide, label) pairs; a slide without a case, or without grouping, is a case of its own."""
    cases: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for slide, case, label in sorted(
        zip(slides["slide_id"], slides["case_id"], slides["label"]), key=lambda row: row[0]
    ):
        known = group_by and pd.notna(case) and case
        cases[f"case {case}" if known else f"slide {slide}"].append((slide, int(label)))
    return cases


def _check_quotas(cohort: Cohort, slides: pd.DataFrame, section: SplitSection) -> None:
    found = Counter(slides["label"])
    needed = section.val_per_class + section.test_per_class + 1
    short = [
        f"class {name} has {found[label]} slides" for label, name in enumerate(cohort.classes) if found[label] < needed
    ]
    if short:
        raise CohortError(
            f"{'; '.join(short)}: too few for {section.val_per_class} validation and {section.test_per_class} test "
            "slides of each class and at least one to train on; lower val_per_class or test_per_class"
        )


def _reserve(
    quota: int,
    part: str,
    cohort: Cohort,
    queues: list[list[str]],
    cases: dict[str, list[tuple[str, int]]],
    free: set[str],
) -> list[str]:
    """Exactly `quota` slides of each class from whole cases, which leave `free`.

    The rarest class chooses first, cases that fit whole go before cases with a slide too many; that slide is unused.
    """
    missing = [quota] * len(queues)
    chosen: list[str] = []
    for label in sorted(range(len(queues)), key=lambda label: len(queues[label])):
        for must_fit in (True, False):
            for case in queues[label]:
                if not missing[label]:
                    break
                sizes = Counter(own for _, own in cases[case])
                if case not in free or (must_fit and any(size > missing[own] for own, size in sizes.items())):
                    continue
                free.discard(case)
                for slide, own in cases[case]:
                    if missing[own]:
                        missing[own] -= 1
                        chosen.append(slide)
    for label, lacking in enumerate(missing):
        if lacking:
            raise CohortError(
                f"class {cohort.classes[label]}: only {quota - lacking} of {quota} {part} slides can be filled "
                "keeping patients together; lower the quotas or set group_by to none"
            )
    return chosen


def _long_tail(cohort: Cohort, pools: list[list[str]], section: SplitSection) -> list[str]:
    """Training slides: all of the pools, or their exponential long tail; every class keeps at least one."""
    classes = range(len(pools))
    keep = [len(pool) for pool in pools]
    if section.imbalance_ratio is not None:
        order = section.order if section.order is not None else sorted(classes, key=lambda label: -len(pools[label]))
        if sorted(order) != list(classes):
            raise CohortError(f"order {list(order)} must name each of the classes 0 to {len(pools) - 1} once")
        for label, count in zip(order, long_tail_counts([keep[label] for label in order], section.imbalance_ratio)):
            keep[label] = count
    empty = [cohort.classes[label] for label in classes if not keep[label]]
    if empty:
        sizes = ", ".join(f"{name} {len(pool)}" for name, pool in zip(cohort.classes, pools))
        raise CohortError(
            f"no training slide would remain of class {', '.join(empty)} (training pool: {sizes}; "
            f"imbalance ratio {section.imbalance_ratio}); lower the ratio or the quotas"
        )
    return [slide for pool, count in zip(pools, keep) for slide in pool[:count]]
