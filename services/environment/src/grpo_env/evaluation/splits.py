"""Keeps test items apart from training items, by the content of their prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

HASH_DIGITS = 16
"""64 bits: among 10 million items, two share a hash with a probability of 3 in a million."""
_NUMBER_OF_HASHES = 1 << (4 * HASH_DIGITS)


def item_hash(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Content hash of an item: the first digits of the SHA-256 of its prompt as canonical JSON.

    Args:
        prompt: the messages, or the text that is continued without a chat template

    Raises:
        TypeError, ValueError: the prompt is not JSON.
    """
    text = json.dumps(
        prompt if isinstance(prompt, str) else [dict(message) for message in prompt],
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:HASH_DIGITS]


def held_out(item: str, share: float) -> bool:
    """True if the item with this hash is a test item.

    It depends on the hash alone. So an item stays on its side when the data set grows or is
    shuffled, and a larger share only adds test items.

    Args:
        share: of test items, from 0 to 1
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"expected a share of held-out items from 0 to 1, got {share}")
    return int(item, 16) < share * _NUMBER_OF_HASHES


@dataclass(frozen=True)
class DisjointItems(Generic[T]):
    """Items that may be evaluated, in their order, and the numbers of those that were removed."""

    items: tuple[T, ...]
    in_training: int
    repeated: int

    @property
    def left_out(self) -> dict[str, int]:
        """For `EvalResult`."""
        return {"in the training data": self.in_training, "repeated": self.repeated}


def disjoint(
    train_hashes: Container[str], test_items: Iterable[T], hash_of: Callable[[T], str]
) -> DisjointItems[T]:
    """Remove test items that are in the training data, and repetitions of test items.

    Args:
        train_hashes: hashes of all training items; a set, because it is asked for every item
    """
    kept: dict[str, T] = {}
    in_training = repeated = 0
    for item in test_items:
        hashed = hash_of(item)
        if hashed in train_hashes:
            in_training += 1
        elif hashed in kept:
            repeated += 1
        else:
            kept[hashed] = item
    return DisjointItems(tuple(kept.values()), in_training, repeated)
