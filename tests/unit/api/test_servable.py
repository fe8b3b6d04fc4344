"""Sizes that a run can serve: alone, with others, or never."""

from __future__ import annotations

import pytest

from grpo_api.exact_sums import Kind
from grpo_api.servable import batch_size_conflicts, can_be_served, partners, why_unservable


@pytest.mark.parametrize(
    ("sequences", "batch_size", "senders", "servable"),
    [
        (8, 40, [], True),
        (40, 40, [], True),
        (41, 40, [8], False),
        (12, 40, [], False),
        (12, 40, [12], False),
        (12, 40, [8], True),  # 12 + 12 + 8 + 8
        (12, 40, [28], True),
        (12, 40, [30, 36], False),
        (12, 40, [64, 8], True),
        (3, 8, [5], True),
        (3, 7, [2], True),
    ],
)
def test_any_number_of_what_others_send(
    sequences: int, batch_size: int, senders: list[int], servable: bool
) -> None:
    others = partners(batch_size, senders, {})
    assert can_be_served(sequences, batch_size, others) is servable


@pytest.mark.parametrize(("queued", "servable"), [(0, False), (1, False), (2, True)])
def test_only_as_many_as_lie_in_the_queue(queued: int, servable: bool) -> None:
    lying = {Kind(None, 8): queued} if queued else {}
    assert can_be_served(12, 40, partners(40, [], lying)) is servable


def test_reason_names_the_batch_and_what_else_is_there() -> None:
    assert "larger batch_size" in why_unservable(41, 40)
    reason = why_unservable(12, 40, {30: 1, 12: 3})
    for part in ("12 sequences", "exactly 40", "groups of 30", "divides 40"):
        assert part in reason


def test_every_conflict_with_a_new_batch_size_is_listed() -> None:
    group_size_of, queued = {0: 8, 1: 12, 2: 5}, {Kind(0, 8): 3, Kind(None, 7): 1}
    assert batch_size_conflicts(40, group_size_of, {Kind(0, 8): 3}) == []
    assert batch_size_conflicts(24, {0: 8, 1: 12}, {Kind(None, 10): 1}) == [
        "groups of 10 sequences are queued"
    ]
    assert batch_size_conflicts(6, group_size_of, queued) == [
        "groups of 7 sequences are queued",
        "groups of 8 sequences are queued",
        "environment 0 sends groups of 8",
        "environment 1 sends groups of 12",
        "environment 2 sends groups of 5",
    ]
