"""Options of the GPU benchmark, the shapes and the work that they choose, and the time it has."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from pydantic import Field

from grpo_core.settings import Command, CommandSettings

ShapeName = Literal["tiny", "0.5b", "1.5b", "7b"]


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


BANDWIDTH_H200 = 4.8e12
"""Bytes per second of an H200's memory, by its datasheet."""


def train_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Of forward and backward passes over sequences of these lengths.

    6 per weight and token (arXiv 2001.08361, section 2.1), where weights are those that tokens are
    multiplied with; and for attention 12 times layers, hidden size and the tokens that each one
    sees (arXiv 2204.02311, appendix B), which are half of a sequence on average: it is causal.
    """
    seen = sum(length * (length + 1) / 2 for length in lengths)
    weights = 6.0 * shape.matmul_parameters * sum(lengths)
    return weights + 12.0 * shape.layers * shape.hidden * seen


def decode_step_bytes(
    shape: ModelShape, concurrency: int, context: float, number_bytes: int
) -> float:
    """Read for one token of each sequence: all weights once, and every sequence's cache.

    Args: context: tokens in the cache of one sequence
    """
    weights = shape.matmul_parameters * number_bytes
    return weights + concurrency * context * shape.kv_bytes_per_token(number_bytes)


def decode_limit(
    shape: ModelShape, concurrency: int, context: float, number_bytes: int, bandwidth: float
) -> float:
    """Tokens per second, if memory were read without a pause. Args: bandwidth: bytes per second"""
    return concurrency * bandwidth / decode_step_bytes(shape, concurrency, context, number_bytes)


def mean_context(prompt_tokens: int, new_tokens: int) -> float:
    """Tokens in the cache, on average over the steps that decode all but the first new token."""
    return prompt_tokens + new_tokens / 2


def publication_bytes(shape: ModelShape, number_bytes: int) -> int:
    """Read and written when new weights of the same type are copied over the served ones."""
    return 2 * shape.parameters * number_bytes


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed (nearest rank); needs one at least."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def evenly_spread(shortest: int, longest: int, count: int) -> list[int]:
    """`count` lengths from the one to the other, both included; needs two at least."""
    return [round(shortest + (longest - shortest) * i / (count - 1)) for i in range(count)]


PartName = Literal["decode", "swap", "memory", "publish", "placement", "train"]
PARTS: tuple[PartName, ...] = get_args(PartName)
"""In the order in which they are measured: servers that are no longer needed make room."""
PART_WEIGHTS: dict[PartName, float] = {
    "decode": 200,
    "swap": 45,
    "memory": 15,
    "publish": 45,
    "placement": 60,
    "train": 115,
}
"""Shares of the time that is left, among the parts that are still to come."""


class GpuBenchSettings(CommandSettings):
    """Measure decoding, publication, adapter swaps, training, memory and sharing of one GPU, with a
    model of random weights, and write a section of docs/contributing/benchmarks.md."""

    command: ClassVar[Command] = Command(prog="bench-gpu", env_prefix="BENCH_GPU_")

    size: ShapeName = Field(description="Shape of the model; tiny runs on a CPU too")
    parts: list[PartName] = Field(list(PARTS), min_length=1, description="What to measure")
    seconds_budget: float = Field(
        480.0,
        gt=0,
        description="Seconds after which nothing new is begun; what has begun is ended in short",
    )
    results: Path | None = Field(
        None, description="Markdown file whose section is replaced, part by part"
    )
    figures: Path = Field(
        Path("runs/gpu-bench/figures.jsonl"),
        description="File that every figure is appended to as soon as it is known",
    )
    directory: Path | None = Field(
        None,
        description="Where the model, logs and vLLM's compiled code lie, and are found again by "
        "the next run (default: a temporary one)",
    )
    vllm_flags: str = Field(
        "", description="More flags for every server, bare vLLM too, as one string"
    )
    commit: str | None = Field(
        None, description="What is measured, where git does not say it (default: git's HEAD)"
    )


@dataclass(frozen=True)
class DecodeWork:
    """`concurrencies`: requests at once, all begun together; each decodes `new_tokens`."""

    concurrencies: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    rounds: int
    min_rounds: int


@dataclass(frozen=True)
class LoadWork:
    """Generations that go on beside what is measured. `new_tokens`: of one request, least and most:
    requests that end at one time would end in waves."""

    concurrency: int
    prompt_tokens: int
    new_tokens: tuple[int, int]


@dataclass(frozen=True)
class TrainWork:
    """Sequences of `shortest` to `longest` tokens, evenly spread; `micro_batch`: at a time."""

    sequences: int
    shortest: int
    longest: int
    micro_batch: int
    steps: int
    min_steps: int


@dataclass(frozen=True)
class GpuWorkload:
    """How much is measured on one model."""

    dtype: str
    engine_flags: tuple[str, ...]
    """But for the next."""
    cache_bytes: int
    """Of keys and values in each server. It is named, because servers that start side by side
    cannot find out what there is room for."""
    servers_at_once: int
    """That may be up beside each other; all but one of them idle."""
    decode: DecodeWork
    load: LoadWork
    """Beside publications and in placement."""
    short_load: LoadWork
    """Beside swaps: short requests, whose ends tell how fast decoding is at any moment."""
    publications: int
    between_publications_s: float
    swaps: int
    between_swaps_s: float
    train: TrainWork
    placement_s: float
    """How long either half of the common work takes alone, about."""
    placement_rounds: int


def workload(size: ShapeName, kv_bytes_per_token: int, on_gpu: bool) -> GpuWorkload:
    """Args: kv_bytes_per_token: of the model in its data type."""
    if size == "tiny":
        return _tiny(on_gpu)
    return _real(size, kv_bytes_per_token)


_MICRO_BATCH: dict[ShapeName, int] = {"0.5b": 8, "1.5b": 4, "7b": 2}
_CACHED_TOKENS = 160_000
"""Room for 256 sequences of 512 tokens, and some."""


def _real(size: ShapeName, kv_bytes_per_token: int) -> GpuWorkload:
    return GpuWorkload(
        dtype="bfloat16",
        engine_flags=(
            *("--max-model-len", "2048", "--max-num-seqs", "256"),
            *("--gpu-memory-utilization", "0.25"),
        ),
        cache_bytes=_CACHED_TOKENS * kv_bytes_per_token,
        servers_at_once=4,
        decode=DecodeWork((1, 64, 256), 128, 256, rounds=7, min_rounds=3),
        load=LoadWork(64, 128, (192, 320)),
        short_load=LoadWork(64, 32, (16, 48)),
        publications=60,
        between_publications_s=0.05,
        swaps=24,
        between_swaps_s=1.2,
        train=TrainWork(8, 512, 2048, _MICRO_BATCH[size], steps=5, min_steps=3),
        placement_s=3.0,
        placement_rounds=3,
    )


def _tiny(on_gpu: bool) -> GpuWorkload:
    return GpuWorkload(
        dtype="bfloat16" if on_gpu else "float32",
        engine_flags=(
            *("--max-model-len", "512", "--max-num-seqs", "32"),
            *(("--gpu-memory-utilization", "0.1") if on_gpu else ("--enforce-eager",)),
        ),
        cache_bytes=64 * 2**20,
        servers_at_once=4 if on_gpu else 2,
        decode=DecodeWork((1, 16), 16, 32, rounds=3, min_rounds=2),
        load=LoadWork(8, 16, (24, 40)),
        short_load=LoadWork(8, 8, (8, 24)),
        publications=50,
        between_publications_s=0.02,
        swaps=20,
        between_swaps_s=0.4,
        train=TrainWork(8, 32, 128, 4, steps=3, min_steps=2),
        placement_s=1.0,
        placement_rounds=2,
    )


@dataclass(frozen=True)
class GpuDeadline:
    """`at`: by `clock`."""

    at: float
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        return self.at - self.clock()

    @property
    def passed(self) -> bool:
        return self.left_s <= 0

    def part_of(self, share: float) -> GpuDeadline:
        """After `share` of what is left."""
        return GpuDeadline(self.clock() + share * max(0.0, self.left_s), self.clock)


class Budget:
    """Args: seconds: from now on"""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.end = GpuDeadline(clock() + seconds, clock)

    def deadline(self, parts_to_come: Sequence[PartName]) -> GpuDeadline:
        """Of the first of the parts: what one before it has not used is shared by all."""
        weights = [PART_WEIGHTS[part] for part in parts_to_come]
        return self.end.part_of(weights[0] / sum(weights))
