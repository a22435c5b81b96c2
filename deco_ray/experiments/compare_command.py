"""`jobs/compare.py` and `deco-ray compare`: any list of methods by seeds in one tracked run."""

from __future__ import annotations

from collections.abc import Sequence

from deco_ray.experiments.arguments import job_parser
from deco_ray.experiments.varied_command import add_base, run_varied


def main(argv: Sequence[str] | None = None) -> int:
    parser = job_parser(
        "compare",
        "Train every listed method with every seed on the same split; print Table 1 with the paper's figures beside\n"
        "ours, paired bootstrap intervals over test slides, and how many seeds were won.",
        "ray job submit -- python jobs/compare.py --config configs/compare.yaml --base configs/panda_lt.yaml",
    )
    add_base(parser)
    return run_varied(parser.parse_args(argv), "configs/compare.yaml")
