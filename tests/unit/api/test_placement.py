"""Groups go to the queue or a buffer, or are rejected; some batch sizes fit no run."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.errors import GroupRefused
from grpo_api.planning.batch_plan import Kind, batch_size_conflicts, why_unservable
from grpo_api.planning.placement import (
    MAX_BUFFERED_GROUPS,
    Groups,
    Placement,
    StoredGroup,
    place,
)

ENV = 3


def stored(id_: int, sequences: int) -> StoredGroup:
    return StoredGroup(id_, sequences, stored_bytes=10)


def placed(buffered: Groups, *sizes: int, env_id: int | None = ENV) -> Placement:
    """The placement of groups 100, 101, ... in a run with batches of 8 and groups of 4."""
    groups = [stored(100 + i, size) for i, size in enumerate(sizes)]
    return place([env_id] * len(groups), groups, 8, {ENV: 4}, {ENV: buffered})


def parts(*sizes: int) -> Groups:
    """Buffered parts 0, 1, ..."""
    return tuple(stored(i, size) for i, size in enumerate(sizes))


def entries(placement: Placement) -> list[list[int]]:
    """The group ids of each entry of the queue."""
    return [[group.id for group in groups] for _, groups in placement.entries]


def test_groups_of_an_unknown_sender_go_straight_to_the_queue() -> None:
    placement = placed(parts(), 2, 1, env_id=9)
    assert entries(placement) == [[100], [101]]
    assert [kind for kind, _ in placement.entries] == [Kind(None, 2), Kind(None, 1)]


def test_a_list_is_placed_in_its_order() -> None:
    placement = placed(parts(), 3, 4, 1, 2)
    assert entries(placement) == [[101], [100, 102]]
    assert [part.id for part in placement.buffers[ENV]] == [103]
    assert placement.buffered_sequences == [3, None, 0, 2]


def oldest_that_complete(waiting: Groups, group_size: int) -> list[int] | None:
    """Ids of parts that add up to a group, found by trying every subset."""
    exact = [
        [part.id for part in subset]
        for count in range(1, len(waiting) + 1)
        for subset in combinations(waiting, count)
        if sum(part.sequences for part in subset) == group_size
    ]
    return min(exact, default=None)


@given(group_size=st.integers(2, 8), sizes=st.lists(st.integers(1, 7), max_size=20))
def test_parts_wait_until_some_complete_a_group_which_the_oldest_do(
    group_size: int, sizes: list[int]
) -> None:
    buffer: Groups = ()
    for id_, size in enumerate(size for size in sizes if size < group_size):
        part = stored(id_, size)
        chosen = oldest_that_complete((*buffer, part), group_size)
        placement = place([ENV], [part], group_size * 3, {ENV: group_size}, {ENV: buffer})
        left = tuple(p for p in (*buffer, part) if p.id not in (chosen or []))
        assert entries(placement) == ([] if chosen is None else [chosen])
        assert placement.buffers == {ENV: left}
        assert placement.buffered_sequences == [sum(p.sequences for p in left)]
        buffer = left


def test_a_part_larger_than_the_group_is_refused() -> None:
    with pytest.raises(GroupRefused, match="registered group_size 4") as refused:
        placed(parts(), 4, 5)
    assert refused.value.index == 1
    assert refused.value.at("tokens").status == 422


@pytest.mark.parametrize(("size", "env_id"), [(1, ENV), (3, None)])
def test_a_size_that_fills_no_batch_is_refused_whoever_sends_it(
    size: int, env_id: int | None
) -> None:
    with pytest.raises(GroupRefused, match="exactly 8"):
        place([env_id], [stored(100, size)], 8, {ENV: 3}, {})


def test_parts_that_never_match_are_refused_at_the_bound_and_keep_nobody_out() -> None:
    most = MAX_BUFFERED_GROUPS * 4 // 3
    full = parts(*[3] * most)
    with pytest.raises(GroupRefused, match="sequences buffered in partial groups of 3") as refused:
        placed(full, 3)
    assert refused.value.at("tokens").status == 409
    assert placed(full, 2).buffered_sequences == [most * 3 + 2]
    assert entries(placed(full, 2, 2)) == [[100, 101]]
    assert entries(placed(full, 1)) == [[0, 100]]


@pytest.mark.parametrize(
    ("sequences", "servable"), [(8, True), (40, True), (12, False), (80, False)]
)
def test_a_size_that_divides_the_batch_of_40_is_served(sequences: int, servable: bool) -> None:
    assert (why_unservable(sequences, 40) is None) is servable


def test_every_conflict_with_a_new_batch_size_is_listed() -> None:
    group_size_of, queued = {0: 8, 1: 20, 2: 5}, {Kind(0, 8): 3, Kind(None, 7): 1}
    assert batch_size_conflicts(40, group_size_of, {Kind(0, 8): 3}) == []
    assert batch_size_conflicts(6, group_size_of, queued) == [
        "groups of 7 sequences are queued",
        "groups of 8 sequences are queued",
        "environment 0 sends groups of 8 sequences",
        "environment 1 sends groups of 20 sequences",
        "environment 2 sends groups of 5 sequences",
    ]
