"""Layers that a model applies to the bag row by row, found by watching it work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from deco_ray.models.protocol import Aggregator

ROW_WISE = (
    nn.Linear,
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Dropout,
    nn.Identity,
)


def row_wise(module: nn.Module) -> bool:
    """Whether each output row depends on the same input row only (in evaluation mode)."""
    if type(module) is nn.Sequential:
        return len(module) > 0 and all(row_wise(child) for child in module)
    if type(module) is nn.LayerNorm:
        return len(module.normalized_shape) == 1
    return type(module) in ROW_WISE


def outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if row_wise(child):
            yield child
        else:
            yield from outermost(child)


def first_row_layers(model: Aggregator, bag: Tensor) -> tuple[list[nn.Module], Tensor]:
    """The outermost row-wise layers that the model calls exactly once, on the bag itself; and its logits [C]."""
    calls: dict[nn.Module, list[bool]] = {}

    def note(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        calls.setdefault(layer, []).append(len(arguments) == 1 and is_bag(arguments[0], bag))

    hooks = [layer.register_forward_pre_hook(note) for layer in outermost(model)]
    try:
        logits = model(bag)
    finally:
        for hook in hooks:
            hook.remove()
    return [layer for layer, seen in calls.items() if seen == [True]], logits


def is_bag(tensor: Tensor, bag: Tensor) -> bool:
    """The bag or a view of all its rows in order, such as one with a leading batch axis."""
    return (
        tensor.data_ptr() == bag.data_ptr()
        and tensor.numel() == bag.numel()
        and tensor.shape[-1] == bag.shape[-1]
        and tensor.is_contiguous()
    )


@contextlib.contextmanager
def substituted(layers: Sequence[nn.Module], outputs: Sequence[Tensor]) -> Iterator[None]:
    """Inside, layer i returns outputs[i] (looked up at each call) in the shape its input asks for."""

    def lookup(position: int):
        return lambda rows: outputs[position].reshape(*rows.shape[:-1], -1)

    try:
        for position, layer in enumerate(layers):
            layer.forward = lookup(position)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
