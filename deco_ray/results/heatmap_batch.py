"""Heatmaps of many slides as Ray tasks: one a slide, a few in flight; a bad slide is named, and skipped if asked."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from pathlib import Path

import ray

from deco_ray.errors import DecoError
from deco_ray.progress import bar
from deco_ray.results.heatmaps import SlideMaps, check_maps, write_slide


@dataclass(frozen=True)
class Rendered:
    slide_id: str
    picture: Path | None  # the PNG; None when the slide failed
    error: str | None = None


def render_many(
    jobs: Iterable[SlideMaps],
    folder: str | Path,
    *,
    total: int | None = None,
    keep_going: bool = False,
    geojson: bool = True,
    in_flight: int | None = None,
    label: str = "heatmaps",
) -> list[Rendered]:
    """Files of every slide below `folder` (shared by all nodes), in the order given.

    Jobs may be made lazily: at most `in_flight` (default: twice the cluster's CPUs) are held at a time. The first bad
    slide stops the batch, unless `keep_going`: then it is listed with its error and the rest are drawn.
    """
    folder = Path(folder).absolute()  # workers have another working directory
    limit = in_flight or 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    results: list[Rendered] = []
    waiting: dict[ray.ObjectRef, int] = {}
    if total is None and isinstance(jobs, Sized):
        total = len(jobs)
    with bar(total, label, "slide") as shown:

        def settle(count: int) -> None:
            for reference in ray.wait(list(waiting), num_returns=count)[0]:
                place = waiting.pop(reference)
                error = ray.get(reference)
                if error is not None:
                    _fail(results, place, error, keep_going)
                shown.update()

        for number, maps in enumerate(jobs):
            results.append(Rendered(maps.slide_id, folder / f"{maps.slide_id}.png"))
            try:
                check_maps(maps)  # before any work starts
            except DecoError as error:
                _fail(results, number, str(error), keep_going)
                shown.update()
                continue
            waiting[_render.remote(maps, str(folder), geojson)] = number
            if len(waiting) >= limit:
                settle(1)
        if waiting:
            settle(len(waiting))
    return results


def _fail(results: list[Rendered], place: int, error: str, keep_going: bool) -> None:
    if not keep_going:
        raise DecoError(error)
    results[place] = Rendered(results[place].slide_id, None, error)


@ray.remote(num_cpus=1)
def _render(maps: SlideMaps, folder: str, geojson: bool) -> str | None:
    """None, or why the slide could not be drawn: an answer, so that Ray does not wrap it in a traceback."""
    try:
        write_slide(maps, folder, geojson=geojson)
    except (DecoError, OSError) as error:
        return str(error) if maps.slide_id in str(error) else f"slide {maps.slide_id}: {error}"
    return None
