"""Patch-level evidence for the report: do contributions find known lesions, and what do tail slides look like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deco_ray.anchors import Anchors
from deco_ray.config import Config
from deco_ray.errors import CohortError
from deco_ray.experiments.methods import Run
from deco_ray.experiments.site import Site
from deco_ray.models.saved import load_model
from deco_ray.results.heatmaps import write_slide
from deco_ray.results.localisation import Localiser, by_class, load_instances, localise
from deco_ray.results.slide_maps import Explainer
from deco_ray.results.tables import Column, Table
from deco_ray.training.losses import log_prior


def explainer(config: Config, site: Site, run: Run) -> Explainer:
    """The run's judge with its anchors: the model whose contributions shaped the final one's bags."""
    assert run.judge is not None
    assert run.anchors is not None
    model, _ = load_model(site.store.path("model", run.judge))
    anchors = Anchors.load(site.store.path("anchors", run.anchors))
    prior = log_prior(site.train_counts).numpy().astype(np.float64)
    return Explainer(model, anchors, prior, config.counterfactual, config.masking, run.seed)


def localisation_table(config: Config, site: Site, run: Run) -> Table | None:
    """AUROC and average precision on the test slides' true lesion patches; none where those are not known."""
    try:
        instances = load_instances(site.cohort, config.report.instances)
    except CohortError:
        if config.report.instances is not None:
            raise
        return None
    judge = explainer(config, site, run)
    section = config.counterfactual
    localiser = Localiser(
        judge.model, judge.anchors, judge.log_prior, section.tau, section.construction, config.masking.lam
    )
    found = by_class(localise(site.cohort, site.split.ids("test"), instances, localiser), site.cohort.classes)
    columns = (
        Column("Class"),
        Column("Slides", digits=0),
        Column("Contribution AUROC", digits=3),
        Column("Attention AUROC", digits=3),
        Column("Contribution AP", digits=3),
        Column("Attention AP", digits=3),
        Column("AP of chance", digits=3),
    )
    names = ["contribution_auroc", "attention_auroc", "contribution_ap", "attention_ap", "lesion_share"]
    rows = [[row["class"], int(row["slides"]), *(float(row[name]) for name in names)] for _, row in found.iterrows()]
    note = (
        f"Judge of seed {run.seed} on test slides; per slide, then averaged. A patch's contribution is that of its "
        "anchor; attention is the patch's own and may localise better where anchors are coarse."
    )
    return Table(columns, rows, "Do contributions and attention find the lesion patches?", note)


def example_heatmaps(config: Config, site: Site, run: Run, folder: Path) -> Iterator[tuple[str, Path]]:
    """Heatmaps of the first test slides of the rarest classes, alternating between classes."""
    rare = sorted(site.groups["tail"] or site.groups["medium"], key=lambda label: site.train_counts[label])
    label_of = dict(zip(site.cohort.slides["slide_id"], site.cohort.slides["label"]))
    queues = [[slide for slide in site.split.ids("test") if label_of[slide] == label] for label in rare]
    order = [
        slide
        for rank in range(max(map(len, queues), default=0))
        for queue in queues
        for slide in queue[rank : rank + 1]
    ]
    judge = explainer(config, site, run)
    for slide in order[: config.report.heatmaps]:
        bag = site.cohort.bag(slide)
        if bag.coords is None:
            return  # a cohort without coordinates has nothing to draw
        found = judge.contributions(bag, bag.label)
        predicted = site.cohort.classes[int(found.log_probabilities.argmax())]
        title = f"{site.cohort.classes[bag.label]}, calibrated prediction {predicted}"
        write_slide(judge.maps(site.cohort, bag, found, title=title), folder)
        yield slide, folder / f"{slide}.png"
