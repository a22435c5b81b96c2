"""Each anchor's normal counterpart."""

from __future__ import annotations

import numpy as np


def match_normals(anchors: np.ndarray, normals: np.ndarray) -> np.ndarray:
    """Index into `normals` [K_n, d] of the cosine-nearest normal prototype of each anchor [K, d]; ties to the first."""
    # float64 and no BLAS: the same on any number of threads, and K x K_n is small
    return np.einsum("kd,nd->kn", anchors.astype(np.float64), normals.astype(np.float64)).argmax(axis=1)
