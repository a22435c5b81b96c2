"""The paper's three cohorts as presets of synthetic ones: classes, exact counts, bag sizes, and how hard they are.

Counts are the supplement's statistics tables. Everything about difficulty is in `Tissue`, one for all presets,
and in `extent`: see deco_ray.cohort.synthetic for what was looked at when these were set.
"""

from __future__ import annotations

from dataclasses import dataclass

from deco_ray.config import SplitSection
from deco_ray.errors import CohortError


@dataclass(frozen=True)
class Tissue:
    """Lengths of the parts a patch feature is the sum of, and how tissues mix."""

    cone: float = 1.0  # the mean all patches share: random patches have a clearly positive cosine
    types: int = 12  # normal tissue types, shared by all slides
    type_length: float = 0.6
    stain: float = 0.3  # one shift for all patches of a slide
    noise: float = 0.5  # of a patch, in all directions
    atypia_noise: float = 0.15  # of a patch, normal or not, along the direction in which grades rise
    marked: float = 0.3  # log-spread of a slide's step to its lesions: some are plain to see, some faint
    mimic: float = 0.7  # a benign look-alike goes this far from normal tissue towards a lesion
    mimic_share: float = 0.06  # of all patches, in slides of every class


@dataclass(frozen=True)
class Preset:
    name: str
    classes: tuple[str, ...]
    full: tuple[int, ...]  # slides of each class in the whole dataset
    train: tuple[int, ...]  # after the long tail
    split: SplitSection  # the protocol that makes `train` out of `full`
    bag_size: tuple[int, float, int, int]  # median, log-spread, smallest, largest
    grade: tuple[float, ...]  # how far a class's lesion lies along the common direction of malignancy
    own: float  # how far it lies along the class's own direction
    extent: tuple[float, ...]  # share of a slide's patches that carry its class's lesion: less towards the tail
    company: float  # extent of a commoner lesion in a rarer class, relative to that in its own
    tissue: Tissue = Tissue()


def _split(val: int, test: int, ratio: float | None = None, order: tuple[int, ...] | None = None) -> SplitSection:
    return SplitSection(val_per_class=val, test_per_class=test, imbalance_ratio=ratio, order=order)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="camelyon_lt",
            classes=("negative", "macro", "micro", "itc"),
            full=(870, 174, 251, 54),
            train=(844, 148, 225, 28),
            split=_split(10, 16),
            bag_size=(1800, 0.6, 300, 12_000),
            grade=(0.0, 0.45, 0.38, 0.32),
            own=0.36,
            extent=(0.0, 0.12, 0.07, 0.03),
            company=0.2,
            tissue=Tissue(mimic_share=0.02),
        ),
        Preset(
            name="panda_lt",
            classes=("benign", "isup1", "isup2", "isup3", "isup4", "isup5"),
            full=(2603, 2399, 1209, 1118, 1124, 1102),
            train=(2303, 1053, 481, 100, 220, 46),
            split=_split(100, 200, 50, (0, 1, 2, 4, 3, 5)),
            bag_size=(36, 0.6, 8, 250),
            grade=(0.0, 0.28, 0.31, 0.34, 0.37, 0.44),
            own=0.30,
            extent=(0.0, 0.30, 0.22, 0.09, 0.13, 0.09),
            company=0.4,
        ),
        Preset(
            name="tissuenet_lt",
            classes=("normal", "lsil", "hsil", "scc"),
            full=(268, 288, 238, 219),
            train=(110, 238, 51, 23),
            split=_split(20, 30, 10, (1, 0, 2, 3)),
            bag_size=(280, 0.7, 40, 2500),
            grade=(0.0, 0.25, 0.32, 0.39),
            own=0.325,
            extent=(0.0, 0.15, 0.08, 0.05),
            company=0.4,
        ),
    )
}


def preset_named(name: str) -> Preset:
    if name not in PRESETS:
        raise CohortError(f"no synthetic preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
