"""The paper's split protocol (supplement, section A): balanced validation and test quotas, then the long tail."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import pandas as pd

from deco_ray.cohort.schema import UNLABELLED
from deco_ray.cohort.store import Cohort
from deco_ray.config import SplitSection
from deco_ray.errors import CohortError
from deco_ray.keys import generator

FEW_SLIDES, MANY_SLIDES = 20, 100  # bounds of Tail and Head when some class is that small


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


def describe_groups(classes: Sequence[str], train_counts: Sequence[int]) -> str:
    """Which classes are Head, Medium and Tail, and by which of the two rules, in one line."""
    groups = frequency_groups(train_counts)
    head, medium, tail = (", ".join(classes[label] for label in groups[name]) or "none" for name in groups)
    if min(train_counts) < FEW_SLIDES:
        return (
            f"Head (more than {MANY_SLIDES} training slides): {head}; Medium: {medium}; "
            f"Tail (fewer than {FEW_SLIDES}): {tail}."
        )
    return (
        f"Head: {head}; Medium: {medium}; Tail: {tail} (thirds of the classes by training slides, as none has fewer "
        f"than {FEW_SLIDES})."
    )


def realised_ratio(train_counts: Sequence[int]) -> float:
    """IR = n_max / n_min of the training slides there are."""
    return max(train_counts) / min(train_counts) if min(train_counts) else math.inf


def assign(cohort: Cohort, section: SplitSection) -> dict[str, str]:
    """Slide id -> val, test or train; slides the long tail leaves out are not mentioned."""
    slides = cohort.slides[cohort.slides["label"] != UNLABELLED]
    _check_order(cohort, section)
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
    return dict.fromkeys(val, "val") | dict.fromkeys(test, "test") | dict.fromkeys(train, "train")


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


def _check_order(cohort: Cohort, section: SplitSection) -> None:
    if section.order is not None and sorted(section.order) != list(range(len(cohort.classes))):
        raise CohortError(
            f"order {list(section.order)} must name each of the classes 0 to {len(cohort.classes) - 1} once"
        )


def _check_quotas(cohort: Cohort, slides: pd.DataFrame, section: SplitSection) -> None:
    found = Counter(slides["label"])
    needed = section.val_per_class + section.test_per_class + 1
    short = [
        f"class {name} has {found[label]} slides" for label, name in enumerate(cohort.classes) if found[label] < needed
    ]
    if short:
        raise CohortError(
            f"{'; '.join(short)}: too few for {section.val_per_class} validation and {section.test_per_class} test "
            "slides of each class and at least one to train on; lower val_per_class (--val) or test_per_class (--test)"
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
                "keeping patients together; lower val_per_class (--val) or test_per_class (--test), or set group_by to "
                "none (leave out --group-by)"
            )
    return chosen


def _long_tail(cohort: Cohort, pools: list[list[str]], section: SplitSection) -> list[str]:
    """Training slides: all of the pools, or their exponential long tail; every class keeps at least one."""
    classes = range(len(pools))
    keep = [len(pool) for pool in pools]
    if section.imbalance_ratio is not None:
        order = section.order if section.order is not None else sorted(classes, key=lambda label: -len(pools[label]))
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
