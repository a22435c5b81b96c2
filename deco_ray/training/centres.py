"""K-means centres of training patches, for methods that start from them (MiCo)."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torch import Tensor

from deco_ray.anchors import fit_kmeans
from deco_ray.keys import generator
from deco_ray.training.slides import RunSlides, Source

POOL_PER_CENTRE = 500  # patches: enough for stable centres of a few dozen clusters


def patch_centres(slides: RunSlides, source: Source, k: int, seed: int) -> Tensor:  # [k, d], unit rows
    """Centres of a keyed pool in which every training slide has the same quota."""
    quota = -(-k * POOL_PER_CENTRE // len(slides.train))
    pool: list[np.ndarray] = []
    with contextlib.closing(source.bags(slides.train)) as features:  # type: ignore[type-var]
        for slide, bag in features:
            chosen = generator(seed, "centres", slide).permutation(len(bag))[:quota]
            pool.append(bag[torch.from_numpy(np.sort(chosen))].numpy())
    return torch.from_numpy(fit_kmeans(np.concatenate(pool), k, seed=seed))
