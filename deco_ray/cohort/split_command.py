"""`deco-ray split`: make a split, store it with the cohort, show its counts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from deco_ray.config import SplitSection, build
from deco_ray.errors import ConfigError

if TYPE_CHECKING:
    from deco_ray.cohort.splits import Split
    from deco_ray.cohort.store import Cohort

LEAKS_SHOWN = 5


def main(argv: list[str]) -> int:
    defaults = SplitSection()
    parser = argparse.ArgumentParser(
        prog="deco-ray split",
        description="Divide a cohort: the same number of validation and test slides from each class first, then the "
        "rest for training, thinned to a long tail if an imbalance ratio is given. Stored as splits/NAME.parquet.",
        epilog="Example: deco-ray split --cohort cohorts/panda --name ir50 --val 100 --test 200 --imbalance-ratio 50",
    )
    parser.add_argument("--cohort", required=True, help="folder or URI of the cohort")
    parser.add_argument("--name", required=True, help="name to store the split under; `split.name` in a configuration")
    parser.add_argument(
        "--val", type=int, default=defaults.val_per_class, help="validation slides a class (%(default)s)"
    )
    parser.add_argument("--test", type=int, default=defaults.test_per_class, help="test slides a class (%(default)s)")
    parser.add_argument("--imbalance-ratio", type=float, help="head over tail training slides (default: keep all)")
    parser.add_argument("--order", help="classes head to tail, such as 0,1,2,4,3,5 (default: by number of slides)")
    parser.add_argument("--group-by", choices=["case_id"], help="keep the slides of a patient in one part")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="another seed draws other slides (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace a stored split of this name")
    arguments = parser.parse_args(argv)
    keys = {
        "name": arguments.name,
        "val_per_class": arguments.val,
        "test_per_class": arguments.test,
        "imbalance_ratio": arguments.imbalance_ratio,
        "order": _order(arguments.order) if arguments.order else None,
        "group_by": arguments.group_by,
        "seed": arguments.seed,
    }
    section = build(SplitSection, keys, "deco-ray split")
    from deco_ray.cohort.splits import leaks, make_split, save_split
    from deco_ray.cohort.store import Cohort

    cohort = Cohort.open(arguments.cohort)
    split = make_split(cohort, section)
    if section.order is not None and section.imbalance_ratio is None:
        print("note: --order has no effect without --imbalance-ratio: all training slides are kept")
    where = save_split(cohort, split, arguments.overwrite)
    print(describe(cohort, split))
    found = leaks(cohort, split)
    if found:
        print(
            f"warning: {len(found)} patients have slides in more than one part; --group-by case_id keeps them together"
        )
        print("\n".join(f"  {line}" for line in found[:LEAKS_SHOWN]))
    print(f"stored in {where}")
    return 0


def _order(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--order {text}: give the numbers of the classes, head to tail, such as 0,1,2,4,3,5; "
            "0 is the first class of cohort.json"
        ) from None


def describe(cohort: Cohort, split: Split) -> str:
    """Slides of each class and part as a table, with the group of each class and the realised imbalance ratio."""
    from deco_ray.cohort.splits import frequency_groups, realised_ratio

    parts = ["train", "val", "test", "unused"]
    counts = {part: split.counts(cohort, part) for part in parts}
    groups = {label: group for group, labels in frequency_groups(counts["train"]).items() for label in labels}
    rows = [["class", *parts, "group"]]
    rows += [
        [f"{label} {name}", *(f"{counts[part][label]:,}" for part in parts), groups[label]]
        for label, name in enumerate(cohort.classes)
    ]
    rows.append(["total", *(f"{sum(counts[part]):,}" for part in parts), ""])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in (0, 5) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, f"split {split.name}: realised imbalance ratio {realised_ratio(counts['train']):.1f}"])
