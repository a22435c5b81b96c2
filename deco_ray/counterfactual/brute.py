from __future__ import annotations
import torch
from deco_ray.counterfactual.outcomes import Outcomes, anchor_means
import numpy as np


def brute_outcomes(model, bag, segment, rows, memory_cap):
    out = []
    for k in range(len(rows)):
        x = bag.clone()
        x[torch.from_numpy(segment == k)] = rows[k]
        out.append(model(x))
    return Outcomes(model(bag), torch.stack(out), anchor_means(model.attention(bag), segment, np.bincount(segment)))
