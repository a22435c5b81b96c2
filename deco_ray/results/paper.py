"""The paper's own numbers, to print beside ours; `paper_results.csv` holds every value of its five tables."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

from deco_ray.results.tables import Estimate

SOURCE = Path(__file__).with_name("paper_results.csv")

COMPARISON, COMPONENTS = "table1_comparison", "table2_components"
MASKING, CONSTRUCTION, SAMPLING = "table3_masking", "table4_construction", "table5_sampling"

# our names of methods and settings -> the paper's rows
PAPER_ROWS: dict[str, dict[str, str]] = {
    COMPARISON: {
        "abmil": "AB-MIL",
        "clam_sb": "CLAM-SB",
        "clam_mb": "CLAM-MB",
        "dsmil": "DS-MIL",
        "transmil": "TransMIL",
        "ilra": "ILRA-MIL",
        "mhim": "MHIM-MIL",
        "mico": "MiCo-MIL",
        "amdmil": "AMD-MIL",
        "wikg": "WiKG-MIL",
        "mde": "MDE-MIL",
        "deco": "DeCo-MIL",
    },
    COMPONENTS: {
        "base": "Base",
        "counterfactual": "+ Counterfactual",
        "debiasing": "+ Debiasing",
        "pseudo_bag": "+ Pseudo-bag",
        "oversampling": "+ Oversampling",
    },
    MASKING: {
        "random": "Random",
        "size": "Anchor-size",
        "attention": "Attention",
        "counterfactual": "Counterfactual",
    },
    CONSTRUCTION: {"zero": "Zero", "anchor": "Anchor Proto.", "normal": "Normal Proto."},
    SAMPLING: {"random": "Random", "equal": "Equal-per-Anchor", "stratified": "Stratified"},
}


@functools.cache
def _values() -> dict[tuple[str, str, str, str], Estimate]:
    with open(SOURCE, newline="") as file:
        return {
            (row["table"], row["dataset"], row["row"], row["metric"]): Estimate(float(row["mean"]), float(row["std"]))
            for row in csv.DictReader(file)
        }


def paper_value(table: str, dataset: str, name: str, metric: str) -> Estimate | None:
    """The paper's mean ± std in percent for our name of a row (or the paper's own); none where it has none."""
    row = PAPER_ROWS.get(table, {}).get(name, name)
    return _values().get((table, dataset, row, metric))


def paper_datasets() -> list[str]:
    return sorted({dataset for _, dataset, _, _ in _values()})


def paper_note(same_features: bool) -> str:
    """What a reader must know before comparing our numbers with the paper's."""
    if same_features:
        return "Paper: as published, on the same kind of features (CONCH) as ours."
    return "Paper: as published, on other features (CONCH, real slides) than ours; not directly comparable."
