"""Models of random weights, the work of the GPU benchmark on each, and the limits of hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from grpo_core.weights.model_files import save_pretrained
from grpo_tiny_model.model import build_tokenizer, ensure_directory

if TYPE_CHECKING:
    from transformers import Qwen2Config

ShapeName = Literal["tiny", "0.5b", "1.5b", "7b", "32b"]


@dataclass(frozen=True)
class ModelShape:
    """A Qwen2 model: grouped attention heads with biases on q, k and v, a gated MLP. `tied`: the
    embeddings and the head are one matrix."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys in one layer; its values are as many."""
        return self.kv_heads * self.hidden // self.heads

    @property
    def matmul_parameters(self) -> int:
        """Weights of the matrix products of each token: of all layers, and the head."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        mlp = 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp) + self.hidden * self.vocabulary

    def kv_bytes_per_token(self, number_bytes: int) -> int:
        """Of its keys and values in all layers."""
        return 2 * self.layers * self.kv_width * number_bytes


SHAPES: dict[ShapeName, ModelShape] = {
    "tiny": ModelShape(128, 2, 4, 2, 512, 512, tied=True),
    "0.5b": ModelShape(896, 24, 14, 2, 4864, 151_936, tied=True),
    "1.5b": ModelShape(1536, 28, 12, 2, 8960, 151_936, tied=True),
    "7b": ModelShape(3584, 28, 28, 4, 18_944, 152_064, tied=False),
    "32b": ModelShape(5120, 64, 40, 8, 27_648, 152_064, tied=False),
}
"""All but the first are those of Qwen2.5 (config.json of each)."""


def train_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Of forward and backward passes over sequences of these lengths.

    6 per weight and token (arXiv 2001.08361, section 2.1), for the weights of matrix products; and
    for attention 12 times layers, hidden size and the tokens that each token sees (arXiv
    2204.02311, appendix B), which are half of a sequence on average: it is causal.
    """
    seen = sum(length * (length + 1) / 2 for length in lengths)
    weights = 6.0 * shape.matmul_parameters * sum(lengths)
    return weights + 12.0 * shape.layers * shape.hidden * seen


def decode_limit(
    shape: ModelShape, concurrency: int, context: float, number_bytes: int, bandwidth: float
) -> float:
    """Tokens per second, if memory were read without a pause: for one token of each sequence, all
    weights once and the cache of every sequence.

    Args:
        context: tokens in the cache of one sequence
        bandwidth: bytes per second
    """
    cache = concurrency * context * shape.kv_bytes_per_token(number_bytes)
    return concurrency * bandwidth / (shape.matmul_parameters * number_bytes + cache)


@dataclass(frozen=True)
class GpuWork:
    """The amount of work on one model. `cache_bytes`: keys and values of each server, because
    servers that start side by side cannot find out how much memory is free. `rounds`,
    `publications`, `steps`: without `min_`, the highest number, if the time allows it.
    `shortest`, `longest`: tokens of the sequences of a training step."""

    engine_flags: tuple[str, ...]
    cache_bytes: int
    concurrencies: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    sequences: int
    shortest: int
    longest: int
    micro_batch: int
    rounds: int = 7
    min_rounds: int = 3
    publications: int = 30
    steps: int = 5
    min_steps: int = 3


_MICRO_BATCH: dict[ShapeName, int] = {"0.5b": 8, "1.5b": 4, "7b": 2, "32b": 1}
_CACHED_TOKENS = 160_000
"""256 sequences of 512 tokens, and some."""


def work_on(size: ShapeName, on_gpu: bool) -> GpuWork:
    if size == "tiny":
        memory = ("--gpu-memory-utilization", "0.1") if on_gpu else ("--enforce-eager",)
        flags = ("--max-model-len", "512", "--max-num-seqs", "32", *memory)
        return GpuWork(flags, 64 * 2**20, (1, 16), 16, 32, 8, 32, 128, 4, rounds=3, min_rounds=2)
    flags = ("--max-model-len", "2048", "--max-num-seqs", "256", "--gpu-memory-utilization", "0.25")
    cache = _CACHED_TOKENS * SHAPES[size].kv_bytes_per_token(torch.bfloat16.itemsize)
    return GpuWork(flags, cache, (1, 32, 256), 128, 256, 8, 512, 2048, _MICRO_BATCH[size])


def make_random_model(shape: ShapeName, directory: Path, dtype: torch.dtype) -> Path:
    """Write a checkpoint with its tokenizer into `directory`, and return that.

    Two calls on one kind of device write the same. An existing checkpoint is left as it is.
    """

    def make(staging: Path) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        save_pretrained(random_policy(shape, dtype, device), staging)
        build_tokenizer().save_pretrained(staging)

    return ensure_directory(directory, make)


def random_policy(shape: ShapeName, dtype: torch.dtype, device: torch.device) -> Any:
    """A model in the memory of `device`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        policy = AutoModelForCausalLM.from_config(_config(SHAPES[shape], dtype), dtype=dtype)
    return policy.eval()


def _config(shape: ModelShape, dtype: torch.dtype) -> Qwen2Config:
    from transformers import Qwen2Config

    specials = len(build_tokenizer())
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype=dtype,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=shape.tied,
        pad_token_id=specials - 3,
        bos_token_id=specials - 2,
        eos_token_id=specials - 1,
    )
