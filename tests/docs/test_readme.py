"""What the README names is there: the tests of its fault table, its make targets, its files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_promised_fault_has_its_tests():
    table = README.split("## What survives which fault")[1].split("\n## ")[0]
    rows = [row.split("|")[1:-1] for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 10
    for fault, _, _, tests in rows:
        folder, names = "", re.findall(r"`([^`]+)`", tests)
        assert names, fault
        for name in names:
            folder = name.rpartition("/")[0] or folder  # the folder is not repeated within a cell
            assert list((ROOT / "tests" / folder).glob(Path(name).name)), f"{fault}: {name}"


def test_make_targets_jobs_and_files_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)\b", README)) - {"it"} <= targets
    for name in re.findall(r"\b(?:jobs|configs|deploy)/[\w./]+\w", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+\.py)` \|$", README, re.MULTILINE):
        assert (ROOT / "benchmarks" / name).exists() or list((ROOT / "tests").rglob(name)), name
