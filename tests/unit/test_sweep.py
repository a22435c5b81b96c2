"""What killed processes leave in a store is removed; what anyone may still be working on stays."""

from __future__ import annotations

import os
import subprocess
import sys

from deco_ray.artefacts import ABANDONED_S, ArtefactStore, temporary_beside

DIES = """
import os, signal, sys
from pathlib import Path
from deco_ray.artefacts import ArtefactStore, owner
store = ArtefactStore(Path(sys.argv[1]))
(store.root / "work" / f"tune-{owner()}").mkdir(parents=True)
store.work("model", "abc")
with store.writing("model", "abc", {}) as folder:
    (folder / "half").write_text("written")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_dead_leave_nothing_but_what_can_be_resumed(tmp_path):
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    left = {path.name.split(".")[-1] for path in (tmp_path / "model").iterdir()}
    assert left == {"tmp"}
    ArtefactStore(tmp_path).sweep()
    assert list((tmp_path / "model").iterdir()) == []
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["model-abc"]


def test_the_living_and_strangers_are_left_alone_for_a_day(tmp_path):
    store = ArtefactStore(tmp_path)
    mine = temporary_beside(store.path("model", "abc"))
    stranger = mine.with_name(".abc.elsewhere~1~12345678.tmp")
    old = mine.with_name(".abc.elsewhere~2~12345678.tmp")
    for path in (mine, stranger, old):
        path.mkdir(parents=True)
    long_ago = old.stat().st_mtime - ABANDONED_S - 60
    os.utime(old, (long_ago, long_ago))
    store.sweep()
    assert set(mine.parent.iterdir()) == {mine, stranger}
