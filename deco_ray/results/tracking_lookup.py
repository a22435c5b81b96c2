"""Finding runs that are already in MLflow: by the digest of what they hold, in one look at a parent and its children.

A SQLite store is asked directly. Importing MLflow and opening its store takes seconds, which a second submit of a
finished pipeline would pay for nothing; MLflow's own search serves every other store.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIGEST, KIND, LOGGED, PARENT = "deco.digest", "deco.kind", "deco.logged", "mlflow.parentRunId"


@dataclass
class Found:
    """A run as MLflow knows it; `children` by digest, of parents only."""

    run_id: str
    tags: dict[str, str]
    children: dict[str, Found] = field(default_factory=dict)


def look_up_sqlite(database: Path, experiment: str, kind: str, digest: str) -> Found | None:
    """The oldest active run of this kind and digest, read without MLflow; sqlite3.Error if that is not possible."""
    if not database.exists():
        return None
    with contextlib.closing(_read_only(database)) as connection:
        rows = connection.execute(
            "SELECT r.run_uuid FROM runs r JOIN experiments e ON e.experiment_id = r.experiment_id"
            " JOIN tags d ON d.run_uuid = r.run_uuid AND d.key = ? AND d.value = ?"
            " JOIN tags k ON k.run_uuid = r.run_uuid AND k.key = ? AND k.value = ?"
            " WHERE e.name = ? AND e.lifecycle_stage = 'active' AND r.lifecycle_stage = 'active'"
            " ORDER BY r.start_time LIMIT 1",
            (DIGEST, digest, KIND, kind, experiment),
        ).fetchall()
        if not rows:
            return None
        run_id = rows[0][0]
        tags: dict[str, dict[str, str]] = {run_id: {}}
        for owner, key, value in connection.execute(
            "SELECT t.run_uuid, t.key, t.value FROM tags t WHERE t.run_uuid = ? UNION ALL"
            " SELECT t.run_uuid, t.key, t.value FROM tags t JOIN tags p ON p.run_uuid = t.run_uuid"
            " JOIN runs r ON r.run_uuid = t.run_uuid"
            " WHERE p.key = ? AND p.value = ? AND r.lifecycle_stage = 'active'",
            (run_id, PARENT, run_id),
        ):
            tags.setdefault(owner, {})[key] = value
    return Found(run_id, tags.pop(run_id), _by_digest(Found(*item) for item in tags.items()))


def known_metrics_sqlite(database: Path, run_id: str) -> dict[str, float]:
    """The last value of every metric of a run, by name."""
    with contextlib.closing(_read_only(database)) as connection:
        return dict(connection.execute("SELECT key, value FROM latest_metrics WHERE run_uuid = ?", (run_id,)))


def _read_only(database: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=5)


def look_up(client: Any, experiment_id: str, kind: str, digest: str) -> Found | None:
    """The same through MLflow's search, for servers and other databases."""
    parent = oldest(client, experiment_id, {DIGEST: digest, KIND: kind})
    if parent is None:
        return None
    children: list[Found] = []
    page = None
    while True:
        found = client.search_runs([experiment_id], f"tags.`{PARENT}` = '{parent.run_id}'", page_token=page)
        children += [Found(run.info.run_id, run.data.tags) for run in found]
        page = found.token
        if not page:
            return Found(parent.run_id, parent.tags, _by_digest(children))


def oldest(client: Any, experiment_id: str, tags: Mapping[str, str | None]) -> Found | None:
    """The oldest active run with these tags, through MLflow's search."""
    asked = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    runs = client.search_runs([experiment_id], asked, max_results=1, order_by=["attributes.start_time ASC"])
    return Found(runs[0].info.run_id, runs[0].data.tags) if runs else None


def _by_digest(runs: Any) -> dict[str, Found]:
    return {run.tags[DIGEST]: run for run in runs if DIGEST in run.tags}
