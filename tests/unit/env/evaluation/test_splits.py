"""Test items are never training items."""

from __future__ import annotations

import hashlib
import random

import pytest

from grpo_env.evaluation.splits import disjoint, held_out, item_hash


def prompt(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Reason."}, {"role": "user", "content": text}]


def test_the_hash_is_that_of_the_canonical_json() -> None:
    canonical = '[{"content":"1+1=","role":"user"}]'
    expected = hashlib.sha256(canonical.encode()).hexdigest()[:16]
    assert item_hash([{"role": "user", "content": "1+1="}]) == expected
    assert item_hash([{"content": "1+1=", "role": "user"}]) == expected
    assert len({item_hash(p) for p in ("1+1=", prompt("1+1="), prompt("1+1= "), [])}) == 4
    assert item_hash(prompt("½ \ud800")) == item_hash(prompt("½ \ud800"))  # not UTF-8


def test_a_split_is_stable_when_data_grows_or_is_shuffled() -> None:
    hashes = [item_hash(f"question {n}") for n in range(5000)]
    test = {h for h in hashes if held_out(h, 0.1)}
    assert len(test) == pytest.approx(500, abs=70)
    shuffled = random.Random(0).sample(hashes, len(hashes))
    assert {h for h in shuffled[:2000] if held_out(h, 0.1)} == test & set(shuffled[:2000])
    assert test < {h for h in hashes if held_out(h, 0.2)}  # a larger share only adds items
    assert not any(held_out(h, 0.0) for h in hashes)
    assert all(held_out(h, 1.0) for h in [*hashes, "f" * 16])
    with pytest.raises(ValueError, match=r"from 0 to 1, got 1\.5"):
        held_out(hashes[0], 1.5)


def test_never_on_training_items() -> None:
    """The test file repeats training questions under other answers, and its own questions."""
    train = [(prompt(f"question {n}"), "#### 1") for n in range(100)]
    test = [(prompt(f"question {n % 150}"), "#### 2") for n in range(60, 200)]
    train_hashes = {item_hash(messages) for messages, _ in train}

    found = disjoint(train_hashes, test, lambda row: item_hash(row[0]))

    assert [messages for messages, _ in found.items] == [
        prompt(f"question {n}") for n in range(100, 150)
    ]
    assert not train_hashes & {item_hash(messages) for messages, _ in found.items}
    assert found.left_out == {"in the training data": 90, "repeated": 0}


def test_a_repeated_test_item_counts_once() -> None:
    found = disjoint(set(), ["a", "b", "a", "a"], item_hash)
    assert (found.items, found.repeated, found.in_training) == (("a", "b"), 2, 0)
