"""What a piece of work has to compute and to move at least, and percentiles.

Nothing here measures. The counts are those of the model's mathematics: what an implementation
computes twice, or pads, is not in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.gpu_bench.shapes import ModelShape

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
