"""Counterfactual scoring: interventions, contributions, the table of contributions, masking ratios."""

from deco_ray.counterfactual.effects import Contributions, contributions
from deco_ray.counterfactual.ratios import masking_ratios

__all__ = ["Contributions", "contributions", "masking_ratios"]
