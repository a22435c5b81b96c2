"""A study: any number of configurations on any number of cohorts, merged into one stage graph and run once.

The pipeline is a study of one configuration; a sweep, a comparison and the paper plan are studies of many.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from deco_ray.anchors import ensure_anchors
from deco_ray.artefacts import owner
from deco_ray.config import AnchorSection, Config
from deco_ray.experiments.board import Board
from deco_ray.experiments.methods import Run, anchors_digest, epoch_warnings, expand
from deco_ray.experiments.schedule import Listener, Workplace, run_stages
from deco_ray.experiments.session import concurrent_runs, connect
from deco_ray.experiments.site import Site, open_site
from deco_ray.experiments.stages import ScoreStage, Stage, StageGraph
from deco_ray.training.shared import open_source


@dataclass
class Study:
    """Collects runs first; nothing is computed until `execute`."""

    base: Config  # resources, storage and tracking are the base's for every member
    sites: dict[str, Site] = field(default_factory=dict)  # by digest of the split
    graph: StageGraph = field(default_factory=StageGraph)
    runs: list[Run] = field(default_factory=list)
    naive: int = 0  # trainings if every run brought its own judge
    anchors: dict[str, tuple[Site, AnchorSection]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    _opened: dict[str, Site] = field(default_factory=dict)
    _warnings: list[str] = field(default_factory=list)  # about settings

    def site(self, config: Config) -> Site:
        """The site of a configuration; the same cohort and split are opened once."""
        key = f"{config.cohort} {config.split.model_dump_json()}"
        if key not in self._opened:
            site = open_site(config)
            self._opened[key] = self.sites.setdefault(site.split.digest, site)
        return self._opened[key]

    def add(
        self,
        config: Config,
        method: str | None = None,
        setting: str = "",
        settings: dict[str, Any] | None = None,
        variant: str = "",
    ) -> list[Run]:
        """The runs of one configuration, one per seed, named for the results table; `variant` names their stages."""
        site = self.site(config)
        runs, stages = expand(config, site.cohort, site.split)
        self.graph.add(replace(stage, variant=variant) for stage in stages)
        self._warnings += epoch_warnings(config)
        self.naive += sum(stage.kind == "model" for stage in stages)
        for stage in stages:
            if isinstance(stage, ScoreStage):
                digest = anchors_digest(config, site.cohort, site.split)
                self.anchors[digest] = (site, config.anchors)
        named = [run.named(method or run.method, setting, settings, site.split.digest) for run in runs]
        for run in named:
            self.graph.results |= {run.model} | ({run.judge} if run.judge else set())
        self.runs += named
        return named

    @property
    def warnings(self) -> list[str]:
        """What a reader of the results must know about data and settings, each once."""
        about_data = [note for site in self.sites.values() for note in site.warnings]
        return list(dict.fromkeys(about_data + self._warnings))

    def missing(self) -> dict[str, Stage]:
        return self.graph.missing({digest: site.store for digest, site in self.sites.items()})

    def execute(self, board: Board, listeners: Sequence[Listener] = ()) -> dict[str, str]:
        """Make everything that is missing; {digest: why} of what failed. Ray is started only if there is work."""
        todo = self.missing()
        for stage in self.graph:
            if stage.digest not in todo:
                board.stage(stage.title, "", reused=True)
        try:
            if todo:
                self.failures = self._make(todo, board, listeners)
        finally:
            for site in self.sites.values():
                site.store.sweep()  # what killed processes left, of this command and of earlier ones
        return self.failures

    def _make(self, todo: dict[str, Stage], board: Board, listeners: Sequence[Listener]) -> dict[str, str]:
        connect(self.base.resources)
        self.make_anchors({stage.anchors for stage in todo.values() if isinstance(stage, ScoreStage)}, board)
        board.total = len(todo)
        board.side_by_side = concurrent_runs(self.base.resources, ray.nodes())
        board.expect(list(todo.values()))
        place = Workplace(
            todo, self.sites, self.sources({stage.site for stage in todo.values()}, board), self.base.resources
        )
        root = next(iter(self.sites.values())).store.root
        return run_stages(todo, place, root / "work" / f"tune-{owner()}", [board, *listeners])

    def make_anchors(self, wanted: set[str], board: Board) -> None:
        """Anchors first, on the whole cluster: they are parallel inside and everything of DeCo waits for them."""
        for digest in [digest for digest in self.anchors if digest in wanted]:
            site, section = self.anchors[digest]
            reused, begun = site.store.exists("anchors", digest), time.monotonic()
            with site.store.explaining():
                ensure_anchors(site.cohort, site.split, section, site.store)
            board.stage(
                "anchors",
                f"{section.k} anchors, {section.k_normal} normal prototypes",
                time.monotonic() - begun,
                reused,
            )

    def sources(self, needed: set[str], board: Board) -> dict[str, Any]:
        """The features of these sites' cohorts, once per node for all runs, or a stream where they do not fit."""
        slides: dict[str, dict[str, None]] = {}
        cohorts = {}
        for digest in needed:
            site = self.sites[digest]
            cohorts[site.cohort.checksum] = site.cohort
            slides.setdefault(site.cohort.checksum, {}).update(dict.fromkeys(site.slide_ids()))
        sources = {}
        for checksum, ids in slides.items():
            begun = time.monotonic()
            sources[checksum], how = open_source(cohorts[checksum], list(ids), self.base.resources.data)
            board.stage("features", f"{len(ids)} slides of {cohorts[checksum].name} {how}", time.monotonic() - begun)
        return sources
