"""The anchors stage: pool the training patches, cluster them, match the normals, assign every patch, keep it all."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from deco_ray.anchors.artefact import Anchors
from deco_ray.anchors.assignments import Assign, write_assignments
from deco_ray.anchors.kmeans import fit
from deco_ray.anchors.lloyd import Fit
from deco_ray.anchors.pool import ANCHORS, NORMALS, Draw, quotas
from deco_ray.artefacts import ArtefactStore, digest, temporary_beside, write_atomically
from deco_ray.cohort.splits import Split
from deco_ray.cohort.store import Cohort, shown
from deco_ray.cohort.stream import map_bags
from deco_ray.config import AnchorSection
from deco_ray.errors import CohortError, DecoError

KIND = "anchors"
Plan = dict[str, dict[str, int]]  # pool -> slide -> quota


def anchor_inputs(cohort: Cohort, split: Split, section: AnchorSection) -> dict[str, Any]:
    """Everything the anchors depend on; backend and workers are not among it."""
    settings = section.model_dump(exclude={"backend", "workers"})
    return {"cohort": cohort.checksum, "split": split.digest, **settings}


def ensure_anchors(cohort: Cohort, split: Split, section: AnchorSection, store: ArtefactStore) -> tuple[str, Path]:
    """Digest and folder of the anchors artefact; made on the running Ray cluster if it does not exist yet."""
    check_split(cohort, split)
    inputs = anchor_inputs(cohort, split, section)
    key = digest(inputs)
    if not store.exists(KIND, key):
        work = store.work(KIND, key)
        with store.unless_made(KIND, key), store.explaining():
            try:
                _make(cohort, split, section, store, key, inputs)
            except DecoError:  # a fault of the input, not of the machine: nothing of it is worth resuming
                shutil.rmtree(work, ignore_errors=True)
                raise
    return key, store.path(KIND, key)


def check_split(cohort: Cohort, split: Split) -> None:
    """Refuse a split that was made for other data than the cohort holds now."""
    made_for = str(split.metadata.get("cohort", ""))
    if made_for != cohort.checksum:
        raise CohortError(
            f"split {split.name!r} was made for other data (checksum {made_for[:8]}) than cohort {cohort.name} at "
            f"{shown(cohort.uri)} holds now ({cohort.checksum[:8]}); make the split again with `deco-ray split`"
        )


def _make(
    cohort: Cohort, split: Split, section: AnchorSection, store: ArtefactStore, key: str, inputs: dict[str, Any]
) -> None:
    train = split.ids("train")
    plan = plan_pools(cohort, train, section)
    work = store.work(KIND, key)
    pools = write_pools(cohort, plan, section.seed, work)
    fits = {
        pool: fit(
            pools[pool],
            k,
            seed=section.seed,
            iterations=section.iterations,
            backend=section.backend,
            workers=section.workers,
            state=work / f"{pool}-state.npz",
            label=f"{pool}: k-means",
        )
        for pool, k in ((ANCHORS, section.k), (NORMALS, section.k_normal))
    }
    anchors = Anchors.of(fits[ANCHORS].centroids, fits[NORMALS].centroids)
    with store.writing(KIND, key, inputs) as folder:
        anchors.save(folder)
        write_atomically(folder / "convergence.json", json.dumps(convergence(fits), indent=1))
        pool_table(cohort, plan).to_parquet(folder / "pool.parquet", index=False)
        with contextlib.closing(assign_slides(cohort, train, anchors)) as assigned:
            write_assignments(folder, anchors.k, assigned)


def plan_pools(cohort: Cohort, train: Sequence[str], section: AnchorSection) -> Plan:
    """Quotas of both pools: all training slides, and those of the normal class."""
    slides = cohort.slides.set_index("slide_id").loc[list(train)]
    normal = slides[slides["label"] == cohort.meta.normal_class]
    if normal.empty:
        raise CohortError(
            f"none of the {len(slides)} training slides is of the normal class "
            f"{cohort.classes[cohort.meta.normal_class]!r}, so there is nothing to make the {section.k_normal} normal "
            "prototypes of; change the split, or normal_class in cohort.json"
        )
    return {
        ANCHORS: quotas(_sizes(slides), section.k * section.pool_per_anchor),
        NORMALS: quotas(_sizes(normal), section.k_normal * section.pool_per_anchor),
    }


def _sizes(slides: pd.DataFrame) -> dict[str, int]:
    return {str(slide): int(n) for slide, n in slides["n_patches"].items()}


def write_pools(cohort: Cohort, plan: Plan, seed: int, work: Path) -> dict[str, Path]:
    """Both pools as .npy files in `work`, drawn in one Ray Data pass over the training slides; whole ones are kept."""
    final = {pool: work / f"{pool}-pool.npy" for pool in plan}
    shapes = {pool: (sum(plan[pool].values()), cohort.dim) for pool in plan}
    if all(is_pool(path, shapes[pool]) for pool, path in final.items()):
        return final
    temporary = {pool: temporary_beside(path) for pool, path in final.items()}
    try:
        with contextlib.ExitStack() as stack:
            # written, not mapped: a disk that fills up behind a mapping ends the process with SIGBUS
            files = {pool: stack.enter_context(open(path, "wb")) for pool, path in temporary.items()}
            for pool, file in files.items():
                file.write(pool_header(shapes[pool]))
            drawing = map_bags(cohort, list(plan[ANCHORS]), Draw(seed, plan), verify=True, label="anchors: pool")
            for _, drawn in stack.enter_context(contextlib.closing(drawing)):
                for pool, rows in drawn.items():
                    files[pool].write(np.ascontiguousarray(rows, "<f4").data)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for pool, path in final.items():
            os.replace(temporary[pool], path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return final


def pool_header(shape: tuple[int, int]) -> bytes:
    """The head of a .npy file of float32 rows [n, d]."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return head.getvalue()


def is_pool(path: Path, shape: tuple[int, int]) -> bool:
    """Whether a whole pool of this shape lies there: a crash of the machine may have cut it."""
    header = pool_header(shape)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return file.read(len(header)) == header and size == len(header) + 4 * shape[0] * shape[1]
    except FileNotFoundError:
        return False


def assign_slides(
    cohort: Cohort, slide_ids: Sequence[str], anchors: Anchors
) -> Generator[tuple[str, int, np.ndarray], None, None]:
    """(slide_id, label, anchor of each patch) in the given order, computed by Ray Data beside the read."""
    label_of = dict(zip(cohort.slides["slide_id"], cohort.slides["label"]))
    for slide, arrays in map_bags(cohort, slide_ids, Assign(anchors), label="anchors: assign"):
        yield slide, int(label_of[slide]), arrays["assignment"]


def pool_table(cohort: Cohort, plan: Mapping[str, Mapping[str, int]]) -> pd.DataFrame:
    """How many patches each training slide has and gave to each pool."""
    slides = list(plan[ANCHORS])
    sizes = _sizes(cohort.slides.set_index("slide_id"))
    given = {pool: [quota.get(slide, 0) for slide in slides] for pool, quota in plan.items()}
    return pd.DataFrame({"slide_id": slides, "n_patches": [sizes[slide] for slide in slides], **given})


def convergence(fits: Mapping[str, Fit]) -> dict[str, list[dict[str, float]]]:
    """Objective (mean cosine), moved centroids and repaired clusters of every iteration."""
    return {pool: [asdict(line) for line in fit.record] for pool, fit in fits.items()}
