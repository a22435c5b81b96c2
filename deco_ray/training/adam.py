"""Adam without torch's compiler, which torch's optimisers import on first use and nothing here needs."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Adam, Optimizer


class PlainAdam(Adam):
    """The same steps; a training process is ready 1.6 s earlier, which short trials of a sweep notice.

    torch wraps these methods so that its compiler leaves them alone; unwrapped they do what they did.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    step = torch.no_grad()(inspect.unwrap(Adam.step))
