"""Arguments that every job shares: --config and --set."""

from __future__ import annotations

import argparse

from deco_ray.cli import program


def job_parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program(name),
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with what differs from the defaults; see configs/")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override one key; may be repeated, for example --set judge_training.epochs=5 --set training.epochs=5",
    )
    return parser
