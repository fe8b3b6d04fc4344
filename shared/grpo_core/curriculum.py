"""Pools of items by their difficulty, as environments write them and reports read them."""

from __future__ import annotations

POOLS_FILE = "pools.jsonl"
"""One line for each time that an environment saved its curriculum: the training step, and the
number of items by the name of the curve."""
PREFIX = "curriculum/"


def pool_curve(task: str, pool: str) -> str:
    """`curriculum/sums/hard`"""
    return f"{PREFIX}{task}/{pool}"
