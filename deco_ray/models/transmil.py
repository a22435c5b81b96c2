"""TransMIL (Shao et al., 2021): a class token gathers the slide through two Nyström attention layers."""

from __future__ import annotations

from deco_ray.models.cls_transformer import ClsTransformer
from deco_ray.models.nystrom import NystromAttention


class TransMIL(ClsTransformer):
    """The class-token skeleton with Nyström attention; depends on the order of patches, by design of PPEG.

    Repeated first tokens as padding and unmasked zero keys are facts of the public code and kept.
    `cls_std` 1e-6 is MIL_BASELINE's class token, 1 the official one. The CLS row of attention can be negative.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        hidden: int = 512,
        heads: int = 8,
        landmarks: int = 256,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        cls_std: float = 1e-6,
        padding: str = "square",
    ) -> None:
        def attention() -> NystromAttention:
            return NystromAttention(hidden, heads, hidden // heads, landmarks, attention_dropout)

        super().__init__(dim, classes, hidden, dropout, cls_std, padding, attention)
