"""`jobs/sweep.py` and `deco-ray sweep`: sensitivity curves, ablations, the imbalance study, or a search."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from deco_ray.errors import ConfigError
from deco_ray.experiments.arguments import job_parser
from deco_ray.experiments.board import Board
from deco_ray.experiments.session import absolute
from deco_ray.experiments.varied_command import add_base, run_varied
from deco_ray.yaml_tree import read_yaml


def main(argv: Sequence[str] | None = None) -> int:
    parser = job_parser(
        "sweep",
        "Run a sweep, an ablation, the imbalance study or a search, as the given file says (configs/sweeps, \n"
        "configs/ablations). Judges and contributions that exist are reused: a sweep of λ trains final models only.",
        "ray job submit -- python jobs/sweep.py --config configs/sweeps/lambda.yaml --base configs/panda_lt.yaml",
    )
    add_base(parser)
    args = parser.parse_args(argv)
    if args.config is None:
        raise ConfigError("--config names what to vary, for example --config configs/sweeps/lambda.yaml")
    if read_yaml(args.config).get("kind") == "search":
        return search(args)
    return run_varied(args, args.config)


def search(args: argparse.Namespace) -> int:
    from deco_ray.experiments.search import METRIC, load_search, run_search

    file, config = load_search(args.config, args.base, tuple(args.set))
    found = run_search(file, absolute(config), Board())
    print(f"\nbest of {len(found.trials)} trials: validation macro-F1 {100 * found.score:.2f} %")
    print(found.trials.sort_values(METRIC, ascending=False).head(10).drop(columns="failure").to_string(index=False))
    print(f"\nbest configuration   {found.path}")
    print(f"all trials           {found.path.parent / 'trials.csv'}")
    print(f"run it               python jobs/full_pipeline.py --config {found.path}")
    return 1 if found.failed else 0
