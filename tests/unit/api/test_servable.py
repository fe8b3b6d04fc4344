"""Sizes that a run can serve: alone, with others, or never."""

from __future__ import annotations

import pytest

from grpo_api.exact_sums import Kind
from grpo_api.servable import batch_size_conflicts, can_be_served, partners, why_unservable


@pytest.mark.parametrize(
    ("sequences", "senders", "queued", "servable"),
    [
        pytest.param(8, [], 0, True, id="divides the batch"),
        pytest.param(41, [8], 0, False, id="larger than the batch"),
        pytest.param(12, [12], 0, False, id="nobody complements it"),
        pytest.param(12, [8], 0, True, id="12 + 12 + 8 + 8"),
        pytest.param(12, [64, 8], 0, True, id="another one is too large"),
        pytest.param(12, [], 1, False, id="one group of 8 lies in the queue"),
        pytest.param(12, [], 2, True, id="two do"),
    ],
)
def test_which_groups_a_batch_of_40_can_hold(
    sequences: int, senders: list[int], queued: int, servable: bool
) -> None:
    lying = {Kind(None, 8): queued} if queued else {}
    assert can_be_served(sequences, 40, partners(40, senders, lying)) is servable


def test_the_reason_names_the_batch_and_what_else_is_there() -> None:
    assert "larger batch_size" in why_unservable(41, 40)
    reason = why_unservable(12, 40, {30: 1, 12: 3})
    for part in ("12 sequences", "exactly 40", "groups of 30", "divides 40"):
        assert part in reason


def test_every_conflict_with_a_new_batch_size_is_listed() -> None:
    group_size_of, queued = {0: 8, 1: 12, 2: 5}, {Kind(0, 8): 3, Kind(None, 7): 1}
    assert batch_size_conflicts(40, group_size_of, {Kind(0, 8): 3}) == []
    assert batch_size_conflicts(6, group_size_of, queued) == [
        "groups of 7 sequences are queued",
        "groups of 8 sequences are queued",
        "environment 0 sends groups of 8",
        "environment 1 sends groups of 12",
        "environment 2 sends groups of 5",
    ]
