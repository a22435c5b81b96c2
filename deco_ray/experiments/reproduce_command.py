"""`jobs/reproduce.py` and `deco-ray reproduce`: the whole paper as one resumable plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from deco_ray.experiments.arguments import job_parser
from deco_ray.experiments.board import Board, clock
from deco_ray.experiments.estimate import estimate_seconds
from deco_ray.experiments.outcome import finished
from deco_ray.experiments.patches import example_heatmaps
from deco_ray.experiments.pipeline_report import Album, longtail_section
from deco_ray.experiments.plan import Plan, open_plan
from deco_ray.experiments.tracked import execute_tracked
from deco_ray.experiments.varied_report import varied_section, varied_table
from deco_ray.results.report import Block, Picture, Section, Text


def main(argv: Sequence[str] | None = None) -> int:
    parser = job_parser(
        "reproduce",
        "Every table and figure of the paper over the cohorts of the plan. Identical trainings are merged, finished\n"
        "ones reused; a killed run goes on with the same command.",
        "ray job submit -- python jobs/reproduce.py --config configs/paper.yaml --only table3,figd1 --dry-run",
    )
    parser.add_argument("--only", default="", metavar="ITEMS", help="items of the plan, for example table3,fig4")
    parser.add_argument("--cohorts", default="", metavar="NAMES", help="cohorts of the plan, for example panda_lt")
    parser.add_argument(
        "--scale", type=float, metavar="S", help="rehearse on synthetic cohorts of this share of the size"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only count and estimate; with --scale the synthetic cohorts to count on are made first, and kept",
    )
    args = parser.parse_args(argv)
    only, cohorts = (tuple(filter(None, text.split(","))) for text in (args.only, args.cohorts))
    plan = open_plan(args.config or "configs/paper.yaml", only, cohorts, args.scale, args.set)
    print(summary(plan), flush=True)
    if args.dry_run:
        if args.scale is not None:
            made = ", ".join(config.cohort for config in plan.configs.values())
            print(f"  counted on {made} (synthetic, kept for the rehearsal)")
        return 0
    outcome = execute_tracked(
        plan.study,
        "plan",
        plan.file.title,
        plan.file.title,
        plan_params(plan),
        lambda f, d: sections(plan, f, d),
        Board(),
        settings=plan_settings(plan),
    )
    for by_cohort in plan.varied.values():
        for varied in by_cohort.values():
            if varied.done():
                print("\n" + varied_table(varied).plain())
    print(f"\nreport      {outcome.report}")
    for title, why in outcome.failures.items():
        print(f"failed: {title}: {why}")
    return 1 if outcome.failures else 0


def plan_params(plan: Plan) -> dict:
    return {"items": ",".join(plan.varied), "cohorts": ",".join(plan.configs)}


def plan_settings(plan: Plan) -> dict:
    """All the report is drawn from besides the runs: the plan, what was chosen of it, every file it names."""
    return {
        "plan": plan.file.model_dump(mode="json"),
        "files": {
            item: {cohort: varied.file.model_dump(mode="json") for cohort, varied in by_cohort.items()}
            for item, by_cohort in plan.varied.items()
        },
        "analysed": list(plan.main),
        "cohorts": {cohort: config.model_dump(mode="json") for cohort, config in plan.configs.items()},
    }


def summary(plan: Plan) -> str:
    """What the plan comes to, counted from its digests: naive, unique, still to do, and how long."""
    naive, unique, missing = plan.counts()
    todo = plan.study.missing().values()
    seconds = estimate_seconds(todo, plan.study.sites)
    cores = os.cpu_count() or 1
    lines = [
        f"{plan.file.title}",
        f"  items      {', '.join([*plan.varied, *(['analyses'] if plan.main else [])])}",
        f"  cohorts    {', '.join(plan.configs)}",
        f"  trainings  {naive} if every experiment had its own judges and finals",
        f"             {unique} unique ({100 * unique / max(1, naive):.0f} %)",
        f"             {missing} still to do",
        f"  estimate   {clock(seconds)} of training at rates measured here, {clock(seconds / cores)} on {cores} cores",
    ]
    return "\n".join(lines)


def sections(plan: Plan, figures: Album, folder: Path) -> list[Section]:
    """Every item in the plan's order."""
    made = []
    for name, item in plan.file.items.items():
        if name in plan.varied:
            made.append(varied_section(name, plan.varied[name], figures, folder))
        elif item.analysis is not None and plan.main:
            made += [
                analysis_section(plan, name, item.analysis, cohort, figures, folder)
                for cohort in plan.main
                if item.cohorts is None or cohort in item.cohorts
            ]
    return made


def analysis_section(plan: Plan, name: str, analysis: str, cohort: str, figures: Album, folder: Path) -> Section:
    """Figure 5 or 6 of one cohort, from the runs of its own configuration."""
    runs = finished(plan.main[cohort], plan.study.sites)
    if not runs:
        return Section(f"{name}: {cohort}", [Text("No run finished.")])
    site = plan.study.sites[runs[0].site]
    if analysis == "longtail":
        found = longtail_section(site, runs, Album(figures.folder / cohort, figures.pdf), folder / cohort)
        return Section(f"Nested long tail: {cohort} ({name})", found.blocks)
    blocks: list[Block] = [
        Picture(picture, slide)
        for slide, picture in example_heatmaps(plan.configs[cohort], site, runs[0], folder / "heatmaps" / cohort)
    ]
    return Section(f"Heatmaps of tail-class slides: {cohort} ({name})", blocks or [Text("No slide with coordinates.")])
