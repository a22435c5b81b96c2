"""DS-MIL (Li et al., 2021), aggregator only: a max stream finds the critical patches, a bag stream attends to them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from deco_ray.models.protocol import Aggregator, Criterion, Partner, Visit


class DSMIL(Aggregator):
    """c = Lin(X) [N, C]; m_j = argmax_n c_nj; A = softmax_N(q(X) q(x_m)ᵀ/√128); B = AᵀV; logits = Lin(flat B).

    V = X, or ReLU(Lin(Dropout(X))) with `passing_v`; q is a tanh MLP, or one linear layer with `linear_query`
    (the publication's form). The head mixes all classes' rows of B. Prediction is the bag stream's;
    training supervises both streams by halves.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        query_dim: int = 128,
        passing_v: bool = False,
        linear_query: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, classes)
        self.instance_classifier = nn.Linear(dim, classes)
        self.query: nn.Module = nn.Linear(dim, query_dim)
        if not linear_query:
            self.query = nn.Sequential(self.query, nn.ReLU(), nn.Linear(query_dim, query_dim), nn.Tanh())
        self.value = nn.Sequential(nn.Dropout(dropout), nn.Linear(dim, dim), nn.ReLU()) if passing_v else nn.Identity()
        self.scale = query_dim**-0.5
        self.classifier = nn.Linear(classes * dim, classes)

    def streams(self, bag: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the bag stream [C] and of the max stream [C], attention A [N, C]."""
        instance_logits = self.instance_classifier(bag)  # [N, C]
        highest, critical = instance_logits.max(0)
        queries = self.query(bag)  # [N, 128]
        attention = (queries @ queries[critical].T * self.scale).softmax(0)  # [N, C]
        pooled = attention.T @ self.value(bag)  # [C, d]
        return self.classifier(pooled.flatten()), highest, attention

    def forward(self, bag: Tensor) -> Tensor:
        return self.streams(bag)[0]

    def attention(self, bag: Tensor) -> Tensor:
        """The predicted class's column of A."""
        logits, _, attention = self.streams(bag)
        return attention[:, logits.argmax()]

    def visit(
        self,
        bag: Tensor,
        label: Tensor,
        sub_bags: Sequence[Tensor] = (),
        *,
        criterion: Criterion,
        partner: Partner | None = None,
        progress: float = 0.0,
    ) -> Visit:
        logits, highest, _ = self.streams(bag)
        max_stream = 0.5 * criterion(highest[None], label[None])
        return Visit(logits, self.sub_bag_logits(bag, sub_bags), 0.5, {"max_stream": max_stream})

    def classifier_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())
