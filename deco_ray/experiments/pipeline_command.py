"""`jobs/full_pipeline.py` and `deco-ray run`: one configuration from cohort to five-seed result."""

from __future__ import annotations

from collections.abc import Sequence

from deco_ray.config import load_config
from deco_ray.experiments.arguments import job_parser
from deco_ray.experiments.pipeline import PipelineResult, run_pipeline


def main(argv: Sequence[str] | None = None) -> int:
    parser = job_parser(
        "run",
        "Train judge, score contributions, train the final model for every seed; print, plot and track the result.\n"
        "Without --config: a small synthetic cohort with the paper's defaults. What is finished already is reused.",
        "ray job submit -- python jobs/full_pipeline.py --config configs/panda_lt.yaml --set cohort=/data/panda",
    )
    args = parser.parse_args(argv)
    result = run_pipeline(load_config(args.config, args.set))
    print(closing(result))
    return 1 if result.failures else 0


def closing(result: PipelineResult) -> str:
    """The last thing a user sees: the table, what to worry about, where to look next."""
    lines = ["", result.table.plain()]
    lines += [f"warning: {note}" for note in result.warnings]
    lines += [
        "",
        f"report      {result.report}",
        f"artefacts   {result.site.store.root}",
        f"browse      deco-ray ui --storage {result.config.storage}   (or `make ui`)",
    ]
    if result.failures:
        lines.append("some runs failed (see above); the same command runs only what is missing")
    return "\n".join(lines)
