"""MiCo (Li et al., 2025): patches are routed to cluster centres and enriched by them, three times."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from deco_ray.errors import ModelError
from deco_ray.models.protocol import Aggregator

CENTRES = 64
LAYERS = 3


class MiCo(Aggregator):
    """P = LeakyReLU(Lin(X)), K = LeakyReLU(Lin′(S)); thrice: W = softmax_j(−‖P−K_j‖/t), P ← LN(P + W K),
    P ← P + MLP(P), K ← MLP across clusters (64→32→16→8); gated attention over [P; K], MLP, Lin.

    Centres S come from K-means of training patches through `set_centres` and are trained on; without it they
    start as normal noise, and unit-norm patches then all go to one cluster. `hard` routes by straight-through
    one-hot. `similarity_bias` exists in the public code, unused; it is kept because its size counts it.
    """

    needs_centres: ClassVar[int] = CENTRES

    def __init__(self, dim: int, classes: int, hidden: int = 512, dropout: float = 0.25, hard: bool = False) -> None:
        super().__init__(dim, classes)
        self.hard = hard
        self.centres = nn.Parameter(torch.randn(CENTRES, dim))
        self.embed_patches = nn.Sequential(nn.Linear(dim, hidden), nn.LeakyReLU())
        self.embed_centres = nn.Sequential(nn.Linear(dim, hidden), nn.LeakyReLU())
        self.temperature = nn.Parameter(torch.ones(()))
        self.similarity_bias = nn.Parameter(torch.zeros(()))
        self.norms, self.mixers, self.reducers = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for layer in range(LAYERS):
            clusters = CENTRES >> layer
            self.norms.append(nn.LayerNorm(hidden))
            self.mixers.append(
                nn.Sequential(
                    nn.Linear(hidden, hidden),
                    nn.ReLU(),
                    nn.Dropout(dropout),
                    nn.Linear(hidden, hidden),
                    nn.Dropout(dropout),
                )
            )
            self.reducers.append(
                nn.Sequential(nn.Linear(clusters, clusters), nn.ReLU(), nn.Linear(clusters, clusters // 2))
            )
        self.project = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout), nn.LayerNorm(hidden))
        self.tanh_branch = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Dropout(dropout))
        self.gate_branch = nn.Sequential(nn.Linear(hidden, hidden), nn.Sigmoid(), nn.Dropout(dropout))
        self.score = nn.Linear(hidden, 1)
        self.compress = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.classifier = nn.Linear(hidden, classes)

    def set_centres(self, centres: Tensor) -> None:
        if centres.shape != self.centres.shape:
            raise ModelError(f"MiCo takes centres of shape {tuple(self.centres.shape)}, got {tuple(centres.shape)}")
        with torch.no_grad():
            self.centres.copy_(centres)

    def route(self, patches: Tensor, clusters: Tensor) -> Tensor:
        """W [N, clusters], rows sum to 1: softmax of negative Euclidean distances over the temperature."""
        squares = patches.square().sum(1, keepdim=True) + clusters.square().sum(1) - 2 * patches @ clusters.T
        weights = (-squares.clamp_min(1e-12).sqrt() / self.temperature).softmax(1)
        if not self.hard:
            return weights
        return one_hot(weights.argmax(1), len(clusters)).to(weights.dtype) + weights - weights.detach()

    def tokens(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        """Values [N+8, D] of patches and last clusters, and their pooling weights [N+8]."""
        patches, clusters = self.embed_patches(bag), self.embed_centres(self.centres)
        for norm, mixer, reducer in zip(self.norms, self.mixers, self.reducers):
            patches = norm(patches + self.route(patches, clusters) @ clusters)
            patches = patches + mixer(patches)
            clusters = reducer(clusters.T).T
        values = self.project(torch.cat([patches, clusters]))
        return values, self.score(self.tanh_branch(values) * self.gate_branch(values))[:, 0].softmax(0)

    def forward(self, bag: Tensor) -> Tensor:
        values, weights = self.tokens(bag)
        return self.classifier(self.compress(weights @ values))

    def attention(self, bag: Tensor) -> Tensor:
        """Pooling weights of the N patches; what is missing to 1 lies on the 8 cluster tokens."""
        return self.tokens(bag)[1][: len(bag)]

    def classifier_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())
