"""The digests of receipts: what they find, and where."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.wire.receipt import (
    count_of,
    digest,
    distribution,
    first_changed,
    packed_ids,
    packed_logprobs,
)

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300)


@given(IDS, st.data())
def test_every_changed_bit_is_found_at_its_place(values: list[int], data: st.DataObject) -> None:
    found = digest(packed_ids(values))
    assert count_of(found) == len(values)
    assert first_changed(packed_ids(values), found) is None
    place = data.draw(st.integers(0, len(values) - 1))
    values[place] ^= 1 << data.draw(st.integers(0, 30))
    changed = first_changed(packed_ids(values), found)
    assert changed is not None
    assert place < changed.stop
    if len(values) <= 64:
        assert changed == range(place, place + 1)
    else:
        assert len(changed) <= -(-len(values) // 64)


def test_long_lists_have_a_range_of_places() -> None:
    values = [*range(2048)]
    found = digest(packed_ids(values))
    values[100] += 1
    assert first_changed(packed_ids(values), found) == range(96, 128)


@pytest.mark.parametrize(
    ("arrived", "place"), [([5, 6, 7], 3), ([5, 6, 7, 8, 9], 4), ([6, 7, 8], 0), ([], 0)]
)
def test_missing_and_additional_values_are_found(arrived: list[int], place: int) -> None:
    found = first_changed(packed_ids(arrived), digest(packed_ids([5, 6, 7, 8])))
    assert found == range(place, place + 1)


def test_a_float32_and_its_float64_are_equal_and_the_next_float32_is_not() -> None:
    sent = packed_logprobs([-0.1, -1.2])
    found = digest(sent)
    assert first_changed(packed_logprobs(sent.tolist()), found) is None
    bits = array("I", sent.tobytes())
    bits[1] += 1
    assert first_changed(array("f", bits.tobytes()), found) == range(1, 2)


def test_neutral_parameters_are_left_out() -> None:
    given_all = {"top_p": 1.0, "top_k": 0, "min_p": 0.1, "logit_bias": {5: 1.0}, "bad_words": None}
    assert distribution(0.7, given_all) == {"temperature": 0.7, "min_p": 0.1, "logit_bias": True}
