"""Shapes of the models that are measured, and what follows from them, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ShapeName = Literal["tiny", "0.5b", "1.5b", "7b"]
SHAPE_NAMES: tuple[ShapeName, ...] = get_args(ShapeName)


@dataclass(frozen=True)
class ModelShape:
    """A Qwen2 model: grouped attention heads with biases on q, k and v, a gated MLP."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Embeddings and head are one matrix."""

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys in one layer; its values are as many."""
        return self.kv_heads * self.head_width

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied with: of all layers, and the head. Embeddings are
        looked up."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        mlp = 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp) + self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        biases = self.hidden + 2 * self.kv_width
        norms = 2 * self.hidden
        embeddings = 0 if self.tied else self.hidden * self.vocabulary
        small = self.layers * (biases + norms) + self.hidden
        return self.matmul_parameters + embeddings + small

    def kv_bytes_per_token(self, number_bytes: int) -> int:
        """Of its keys and values in all layers."""
        return 2 * self.layers * self.kv_width * number_bytes


SHAPES: dict[ShapeName, ModelShape] = {
    "tiny": ModelShape(128, 2, 4, 2, 512, 512, tied=True),
    "0.5b": ModelShape(896, 24, 14, 2, 4864, 151_936, tied=True),
    "1.5b": ModelShape(1536, 28, 12, 2, 8960, 151_936, tied=True),
    "7b": ModelShape(3584, 28, 28, 4, 18_944, 152_064, tied=False),
}
"""The last three are those of Qwen2.5 (config.json of each)."""
