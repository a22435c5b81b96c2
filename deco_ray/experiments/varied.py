"""A sweep, ablation, comparison or imbalance study on one cohort: its runs in a study, its results as one frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from deco_ray.config import Config
from deco_ray.experiments.methods import DECO, Run
from deco_ray.experiments.outcome import finished, read_predictions, results_frame
from deco_ray.experiments.site import Site
from deco_ray.experiments.study import Study
from deco_ray.experiments.variants import VariantFile, members
from deco_ray.models.registry import display_name
from deco_ray.results.bootstrap import Predictions
from deco_ray.results.performance import PaperColumns

Scores = dict[str, dict[Any, list[float]]]  # metric -> value of the axis -> scores of the seeds


@dataclass(frozen=True)
class Varied:
    """One variant file on one cohort; `results` exist once the study has been executed."""

    file: VariantFile
    config: Config
    site: Site
    sites: Mapping[str, Site]
    runs: dict[str, list[Run]]  # by variant, all seeds

    def done(self) -> dict[str, list[Run]]:
        """Finished runs by variant; variants without any are left out."""
        found = {name: finished(runs, self.sites) for name, runs in self.runs.items()}
        return {name: runs for name, runs in found.items() if runs}

    def results(self) -> pd.DataFrame:
        """One row per (variant, seed, metric), the variant's name as the method."""
        return results_frame([run for runs in self.done().values() for run in runs], self.sites)

    def predictions(self) -> dict[str, Predictions]:
        """Test predictions by variant, for paired statistics."""
        return {name: read_predictions(runs, self.sites) for name, runs in self.done().items()}

    def labels(self) -> dict[str, str]:
        """How each variant is called in tables: its method, its value on the axis, or both."""
        labels = {}
        for variant in self.file.expanded():
            parts = [variant.label] if variant.label else []
            if not parts and "method" in variant.settings:
                parts = [method_label(str(variant.settings["method"]), self.config)]
            if parts and self.file.axis is not None:
                parts.append(str(variant.settings[self.file.axis]))
            labels[variant.name] = ", ".join(parts) or variant.name
        return labels

    def header(self) -> str:
        """What the labels are, for the head of a table."""
        axis = self.file.axis_label or self.file.axis
        if axis is None:
            return "Method"
        return f"Method, {axis}" if self.file.methods or self.file.variants else axis

    def curves(self) -> dict[str, Scores]:
        """Along the axis: {series: {metric: {value: scores}}}; the series is "" unless methods cross the axis."""
        assert self.file.axis is not None
        frame = self.results()
        curves: dict[str, Scores] = {}
        for variant in self.file.expanded():
            value = variant.settings[self.file.axis]
            series = str(variant.settings.get("method", "")) if self.file.methods else ""
            part = frame[frame["method"] == variant.name]
            for metric, scores in part.groupby("metric")["value"]:
                curves.setdefault(series, {}).setdefault(str(metric), {})[value] = scores.tolist()
        return curves

    def default(self) -> Any:
        """The base configuration's own value on the axis."""
        node: Any = self.config.model_dump(mode="json")
        for part in (self.file.axis or "").split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def paper(self) -> PaperColumns | None:
        dataset = self.config.paper.dataset
        if dataset is None or self.file.paper_table is None:
            return None
        return PaperColumns(dataset, self.config.paper.same_features, table=self.file.paper_table)


def add_varied(study: Study, file: VariantFile, config: Config) -> Varied:
    """Put every variant into the study; identical work is merged there."""
    runs = {
        variant.name: study.add(member, method=variant.name, settings=variant.settings, variant=file.told(variant))
        for variant, member in members(file, config)
    }
    return Varied(file, config, study.site(config), study.sites, runs)


def method_label(method: str, config: Config) -> str:
    options = config.model.options if config.model.name == method else {}
    return "DeCo-MIL" if method == DECO else display_name(method, options)
