"""The stage graph: what has to exist before what, each stage under the digest of its inputs.

All digests follow from configurations alone, before anything has run. So experiments that share a judge or
a contribution table share the stage, a dry run can count, and a second run finds everything done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from deco_ray.artefacts import ArtefactStore
from deco_ray.config import CounterfactualSection
from deco_ray.training.spec import RunSpec


@dataclass(frozen=True)
class TrainStage:
    """Train one model: a judge, a baseline or a DeCo final model."""

    digest: str
    name: str
    spec: RunSpec
    needs: tuple[str, ...] = ()  # digests of the stages whose artefacts it reads
    kind: Literal["model"] = "model"
    variant: str = ""  # the one of a study's variants it belongs to, for people to read

    @property
    def title(self) -> str:
        return titled(self.name, self.variant)

    @property
    def seed(self) -> int:
        return self.spec.seed

    @property
    def site(self) -> str:
        """Digest of the split it belongs to."""
        return self.spec.split


@dataclass(frozen=True)
class ScoreStage:
    """Score the training slides of one judge: the contribution table."""

    digest: str
    name: str
    seed: int
    site: str  # digest of the split it belongs to
    judge: str
    anchors: str
    section: CounterfactualSection
    kind: Literal["contributions"] = "contributions"
    variant: str = ""

    @property
    def title(self) -> str:
        return titled(self.name, self.variant)

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.judge,)


Stage = TrainStage | ScoreStage


def titled(name: str, variant: str) -> str:
    return f"{name} ({variant})" if variant else name


@dataclass
class StageGraph:
    """Stages by digest; adding one twice is adding it once, and what variants share bears the name of none."""

    stages: dict[str, Stage] = field(default_factory=dict)
    results: set[str] = field(default_factory=set)  # stages whose own numbers are asked for

    def add(self, stages: Iterable[Stage]) -> None:
        for stage in stages:
            known = self.stages.setdefault(stage.digest, stage)
            if known.variant != stage.variant:
                self.stages[stage.digest] = replace(known, variant="")

    def missing(self, stores: Mapping[str, ArtefactStore]) -> dict[str, Stage]:
        """What has to run, given the store of each site: results without an artefact, and what those still need.

        A table whose final model exists is not computed again just because its own folder was removed.
        """
        absent = {key for key, stage in self.stages.items() if not stores[stage.site].exists(stage.kind, key)}
        wanted: set[str] = set()
        frontier = [digest for digest in self.results if digest in absent]
        while frontier:
            digest = frontier.pop()
            if digest in absent and digest not in wanted:
                wanted.add(digest)
                frontier += self.stages[digest].needs
        return {digest: stage for digest, stage in self.stages.items() if digest in wanted}

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages.values())


@dataclass
class Progress:
    """Which stage may start next, kept apart from Tune so that it can be tested without it."""

    pending: dict[str, Stage]
    running: dict[str, Stage] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # digest -> why
    deaths: Counter[str] = field(default_factory=Counter)  # how often a stage was put back

    def ready(self) -> Stage | None:
        """The first pending stage whose needs are neither pending nor running nor failed; it counts as running now."""
        stage = self._next()
        if stage is not None:
            del self.pending[stage.digest]
            self.running[stage.digest] = stage
        return stage

    def _next(self) -> Stage | None:
        for stage in self.pending.values():
            if not any(need in self.pending or need in self.running or need in self.failed for need in stage.needs):
                return stage
        return None

    def finish(self, digest: str, failure: str | None = None) -> None:
        self.running.pop(digest, None)
        if failure is not None:
            self.failed[digest] = failure

    def put_back(self, digest: str) -> None:
        """The stage's process died before it had begun: it is next again."""
        self.pending = {digest: self.running.pop(digest), **self.pending}
        self.deaths[digest] += 1

    def unfinished(self) -> bool:
        """Whether something still runs or could start; else what is pending needs a stage that failed."""
        return bool(self.running) or self._next() is not None
