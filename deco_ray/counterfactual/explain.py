"""Why a slide got its grade: the attribution of training slides, for any slide and any trained model."""

from __future__ import annotations

from numpy.typing import ArrayLike
from torch import Tensor

from deco_ray.anchors.artefact import Anchors
from deco_ray.counterfactual.effects import Contributions, Method, contributions
from deco_ray.counterfactual.replacements import Construction, replacements
from deco_ray.models.protocol import Aggregator


def explain_bag(
    model: Aggregator,
    bag: Tensor,
    anchors: Anchors,
    log_prior: ArrayLike,
    tau: float = 1.0,
    construction: Construction = "normal",
    label: int | None = None,
    method: Method = "auto",
) -> Contributions:
    """What each anchor of a bag [N, d] contributes to the label, or to the calibrated prediction without one.

    The anchor of each patch is `anchors.assign(bag)`.
    """
    rows = replacements(anchors, construction)
    return contributions(model, bag, anchors.assign(bag), rows, log_prior, label, tau, method)
