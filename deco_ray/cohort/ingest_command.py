"""`deco-ray ingest`: parse, ingest, show what is in the cohort."""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING

from deco_ray.cli import program

if TYPE_CHECKING:
    from deco_ray.cohort.store import Cohort

FORMATS = ["auto", "clam", "trident", "stamp", "pt", "npy"]


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from deco_ray.cohort import ingest

    cohort = ingest(
        arguments.source,
        arguments.out,
        labels=arguments.labels,
        classes=_classes(arguments.classes),
        normal_class=arguments.normal_class,
        format=arguments.format,
        on_error=arguments.on_error,
        splits=[] if arguments.no_splits else arguments.split,
        name=arguments.name,
        encoder=arguments.encoder,
        patch_size=arguments.patch_size,
        magnification=arguments.magnification,
        unlabelled=arguments.unlabelled,
    )
    print(describe(cohort))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("ingest"),
        description="Turn a folder of patch features (CLAM, TRIDENT, STAMP, .pt or .npy files, one per slide) and a "
        "CSV of labels into a cohort, the Parquet folder that everything else reads. Every file is checked; if any "
        "is wrong, all problems are listed and nothing is written. An interrupted ingest goes on where it stopped.",
        epilog="Example: deco-ray ingest features/ cohorts/camelyon --labels labels.csv "
        "--classes negative,macro,micro,itc",
    )
    parser.add_argument("source", help="folder with the feature files, or CLAM's or TRIDENT's output folder")
    parser.add_argument("out", help="folder of the new cohort; must not exist yet")
    parser.add_argument("--labels", help="CSV case_id,slide_id,label (default: labels.csv in the source)")
    parser.add_argument(
        "--classes",
        help="class names in order, such as normal,grade1,grade2, or a YAML file with `classes: [...]` and "
        "`normal_class: ...` (default: classes.yaml beside the labels; not needed for labels 0, 1, 2, ...)",
    )
    parser.add_argument("--normal-class", help="name or number of the class without lesions (default: the first)")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="who wrote the files (default: find out)")
    parser.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="skip leaves wrong slides out and lists them in rejected.csv of the cohort (default: stop)",
    )
    parser.add_argument(
        "--split",
        action="append",
        metavar="CSV",
        help="keep this split of CLAM or MIL_BASELINE; may be repeated (default: splits_*.csv in the source)",
    )
    parser.add_argument("--no-splits", action="store_true", help="ignore the splits found in the source")
    parser.add_argument("--unlabelled", action="store_true", help="no labels: a cohort to predict on")
    parser.add_argument("--name", help="name of the cohort (default: that of its folder)")
    parser.add_argument("--encoder", help="name of the encoder, noted in the cohort; picks features_<encoder>")
    parser.add_argument("--patch-size", type=int, help="side of a patch as the encoder saw it, in pixels; noted")
    parser.add_argument("--magnification", type=float, help="of the patches, such as 20; noted")
    return parser


def _classes(text: str | None) -> list[str] | Path | None:
    if text is None or not text.lower().endswith((".yaml", ".yml")):
        return None if text is None else text.split(",")
    return Path(text)


def describe(cohort: Cohort) -> str:
    """One table: slides and patches of each class, the rejected, where the cohort is, and the splits it came with."""
    from deco_ray.cohort.splits import split_names

    slides = cohort.slides
    names = list(enumerate(cohort.classes)) or [(-1, "unlabelled")]
    rows = [(name, slides.loc[slides["label"] == label, "n_patches"]) for label, name in names]
    rows.append(("all", slides["n_patches"]))
    width = max(len("class"), *(len(name) for name, _ in rows))
    lines = [f"{'class':<{width}}  {'slides':>8}  {'patches':>12}"]
    lines += [f"{name:<{width}}  {len(sizes):>8,}  {int(sizes.sum()):>12,}" for name, sizes in rows]
    rejected = Path(cohort.uri) / "rejected.csv"
    if rejected.is_file():
        with open(rejected, newline="", encoding="utf-8") as file:
            lines.append(f"{'rejected':<{width}}  {sum(1 for _ in csv.reader(file)) - 1:>8,}  see {rejected}")
    lines.append(f"cohort {cohort.name}, {cohort.dim} dimensions, {cohort.meta.dtype}: {cohort.uri}")
    if kept := split_names(cohort):
        which = f"split {kept[0]}; use it" if len(kept) == 1 else f"splits {', '.join(kept)}; use one"
        lines.append(f"kept {which} with --set split.name={kept[0]}")
    return "\n".join(lines)
