"""The bags of a visit: the redundancy-reduced bag X* and the pseudo-bags drawn from it.

A subset per anchor is one sort: every patch gets a random key, patches are ordered by (anchor, key), and
the first few of each anchor are taken. No loop runs over patches or anchors.
"""

from __future__ import annotations

import numpy as np

from deco_ray.errors import DecoError

KEY_BITS = 48  # of the random key below a patch's anchor; ties would be broken by the sort of the day
HALF = 0.5 + 1e-9  # (1 - 0.9) * 5 is a half that floating point puts just below one


def reduce_bag(assignment: np.ndarray, ratios: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Kept patch indices, ascending: a share 1 - r_k of every anchor k, drawn without replacement (Eq. 10).

    assignment [N] holds each patch's anchor, ratios [K] the masking ratio of every anchor. A bag that would
    be empty keeps one random patch of its best-scored anchor, which is the one masked least.
    """
    assignment, ratios = np.asarray(assignment, np.int64), np.asarray(ratios, np.float64)
    sizes = np.bincount(assignment, minlength=len(ratios))
    quota = rounded((1.0 - ratios) * sizes)
    if not quota.any():
        quota[np.where(sizes > 0, ratios, np.inf).argmin()] = 1
    return random_subsets(assignment, sizes, quota, rng)[0]


def pseudo_bags(
    assignment: np.ndarray,
    kept: np.ndarray,
    rho: float,
    m: int,
    rng: np.random.Generator,
    strategy: str = "stratified",
) -> list[np.ndarray]:
    """m independent pseudo-bags of the reduced bag `kept`, as ascending patch indices into the full bag."""
    kept = np.asarray(kept, np.int64)
    return [kept[members] for members in sub_bags(np.asarray(assignment, np.int64)[kept], rho, m, rng, strategy)]


def sub_bags(
    assignment: np.ndarray, rho: float, m: int, rng: np.random.Generator, strategy: str = "stratified"
) -> list[np.ndarray]:
    """As `pseudo_bags`, for a bag that is reduced already: ascending positions in it."""
    if strategy == "random":
        assignment = np.zeros_like(assignment)  # one stratum: round(ρ|X*|) patches of the whole bag
    sizes = np.bincount(assignment)
    if strategy == "equal":
        return [random_subsets(assignment, sizes, equal_quotas(sizes, rho, rng), rng)[0] for _ in range(m)]
    if strategy not in ("stratified", "random"):
        raise DecoError(f"unknown pseudo_bags.strategy {strategy!r}; known: stratified, random, equal")
    quota = np.where(sizes > 0, np.maximum(rounded(rho * sizes), 1), 0)  # Eq. 11
    return random_subsets(assignment, sizes, quota, rng, m)


def random_subsets(
    assignment: np.ndarray, sizes: np.ndarray, quota: np.ndarray, rng: np.random.Generator, times: int = 1
) -> list[np.ndarray]:
    """RandSubset of Eq. 10-11 for all anchors at once: ascending positions of quota[k] patches of each anchor k.

    So many independent draws as `times` says.
    """
    n = len(assignment)
    keys = rng.integers(0, 1 << KEY_BITS, (times, n))
    keys += assignment << KEY_BITS
    order = keys.argsort(1)
    # quota[k] ones, then sizes[k] - quota[k] zeros, anchor after anchor: which places of the sorted order to take
    runs = np.empty(2 * len(sizes), np.int64)
    runs[0::2], runs[1::2] = quota, sizes - quota
    taken = (np.arange(2 * len(sizes)) % 2 == 0).repeat(runs)
    chosen = order[:, taken]
    chosen.sort(1)
    return list(chosen)


def equal_quotas(sizes: np.ndarray, rho: float, rng: np.random.Generator) -> np.ndarray:
    """round(ρ|X*|) patches shared equally by the non-empty anchors, at least one each.

    What small anchors cannot give goes to the others in equal parts; what does not divide goes to random ones.
    """
    total = max(int(rounded(rho * sizes.sum())), int((sizes > 0).sum()))
    ascending = np.sort(sizes)
    given = ascending.cumsum()
    others = len(sizes) - 1 - np.arange(len(sizes))
    exhausted = int((given + ascending * others <= total).sum())  # so many anchors give all they have
    left = len(sizes) - exhausted
    level = (total - int(given[exhausted - 1] if exhausted else 0)) // left if left else int(ascending[-1])
    quota = np.minimum(sizes, level)
    higher = np.flatnonzero(sizes > level)
    if len(higher):
        quota[rng.permutation(higher)[: total - quota.sum()]] += 1
    return quota


def rounded(values: np.ndarray | float) -> np.ndarray:
    """Nearest integers, halves up (DESIGN: the paper's ⌊·⌉)."""
    return np.floor(np.asarray(values) + HALF).astype(np.int64)
