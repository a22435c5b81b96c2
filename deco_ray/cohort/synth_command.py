"""`deco-ray synth`: write a synthetic cohort and say what is in it."""

from __future__ import annotations

import argparse

from deco_ray.cohort.presets import PRESETS


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="deco-ray synth",
        description="Make a synthetic cohort with the class counts of one of the paper's datasets: features that "
        "behave like a pathology encoder's, a split named 'paper', and the true lesion patches to check explanations.",
        epilog="Example: deco-ray synth --preset panda_lt --scale 0.1 --out cohorts/panda_small",
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="panda_lt", help="dataset to imitate (%(default)s)")
    parser.add_argument("--scale", type=float, default=0.1, help="share of the paper's slides, up to 1 (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes another cohort (%(default)s)")
    parser.add_argument("--out", help="folder to create (default: cohorts/PRESET)")
    arguments = parser.parse_args(argv)
    # pyarrow and torch load only once the arguments are right
    from deco_ray.cohort.split_command import describe
    from deco_ray.cohort.splits import load_split
    from deco_ray.cohort.synthetic import PAPER_SPLIT, synthesize

    out = arguments.out or f"cohorts/{arguments.preset}"
    cohort = synthesize(out, arguments.preset, arguments.scale, arguments.seed)
    patches = cohort.slides["n_patches"]
    print(f"{out}: {len(cohort.slides)} slides, {patches.sum():,} patches, {patches.median():.0f} in a middling slide")
    print(describe(cohort, load_split(cohort, PAPER_SPLIT)))
    return 0
