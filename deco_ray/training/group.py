"""Workers that train one model together: each takes its share of the visits, gradients are averaged.

One worker is the method of the paper (one slide a step). More make a step of that many slides, which is a
different batch size and therefore a different result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Solo:
    """A run with one worker."""

    rank, size = 0, 1

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        pass

    def agree(self, value: bool) -> bool:
        """Rank 0's answer, for everybody."""
        return value


class PeerLost(Exception):
    """Another worker of the group is gone; this one did nothing wrong."""


@contextmanager
def together() -> Iterator[None]:
    """A collective call: nothing of ours can fail in it but a worker that no longer answers."""
    try:
        yield
    except RuntimeError as error:  # what torch raises, whatever the backend
        raise PeerLost(str(error)) from error


class ProcessGroup(Solo):
    """The workers of an initialised torch.distributed group."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Mean gradient over the workers that had a visit; a parameter nobody used keeps no gradient."""
        used = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        head = torch.cat([used.max().reshape(1), used])  # whether this worker had a visit, and what it used
        flat = torch.cat([head, *(gradient(p).flatten() for p in parameters)])
        with together():
            torch.distributed.all_reduce(flat)
        visited, *users = flat[: len(head)].tolist()
        pieces = (flat[len(head) :] / visited).split([p.numel() for p in parameters])
        for parameter, count, piece in zip(parameters, users, pieces):
            parameter.grad = piece.view_as(parameter) if count else None

    def agree(self, value: bool) -> bool:
        flag = torch.tensor([float(value)], device=self.device)
        with together():
            torch.distributed.broadcast(flag, 0)
        return bool(flag.item())


def gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
