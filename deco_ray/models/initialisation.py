"""The weight initialisation that the paper's likely source gives to most of its models."""

from __future__ import annotations

from torch import nn


def xavier_normal(module: nn.Module) -> None:
    """Xavier-normal weights and zero biases in every linear layer below; norms keep their (1, 0)."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
