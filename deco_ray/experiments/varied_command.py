"""What `sweep` and `compare` share: load a variant file, run it as one tracked study, print its tables."""

from __future__ import annotations

import argparse

from deco_ray.experiments.board import Board
from deco_ray.experiments.session import absolute
from deco_ray.experiments.study import Study
from deco_ray.experiments.tracked import execute_tracked
from deco_ray.experiments.variants import load_variants
from deco_ray.experiments.varied import add_varied
from deco_ray.experiments.varied_report import varied_section, varied_table


def add_base(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="FILE", help="configuration to vary, instead of the one the file names")


def run_varied(args: argparse.Namespace, default: str) -> int:
    """Everything the file asks for; exit code 1 when some run failed."""
    path = args.config or default
    file, config = load_variants(path, args.base, tuple(args.set))
    study = Study(absolute(config))
    varied = add_varied(study, file, study.base)
    board = Board()
    trainings = sum(stage.kind == "model" for stage in study.missing().values())
    unique = sum(stage.kind == "model" for stage in study.graph)
    board.say(f"{file.title}: {unique} trainings ({study.naive} if each brought its own judge), {trainings} to do")
    params = {"axis": file.axis or "", "variants": len(file.expanded()), "seeds": len(config.seeds)}
    outcome = execute_tracked(
        study,
        file.kind,
        f"{config.name}: {file.title}",
        file.title,
        params,
        lambda figures, folder: [varied_section(file.kind, {varied.site.cohort.name: varied}, figures, folder)],
        board,
        settings={"file": file.model_dump(mode="json")},
    )
    print("\n" + varied_table(varied).plain())
    for text in outcome.verdicts:
        print(text)
    print(f"\nreport      {outcome.report}")
    print(f"tables      {outcome.report.parent / 'tables'}   (Markdown, CSV, LaTeX)")
    for title, why in outcome.failures.items():
        print(f"failed: {title}: {why}")
    return 1 if outcome.failures else 0
