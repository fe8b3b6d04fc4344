"""Where groups go: queue or buffer, and what is refused."""

from __future__ import annotations

import random

import pytest

from grpo_api.bundles import StoredGroup
from grpo_api.errors import GroupRefused
from grpo_api.placement import (
    MAX_BUFFERED_GROUPS,
    Arrival,
    Buffer,
    IntakeState,
    Placement,
    completing_parts,
    place,
)

ENV = 3


def stored(id_: int, sequences: int) -> StoredGroup:
    return StoredGroup(id_, sequences, stored_bytes=10)


def arrivals(*sizes: int, env_id: int | None = ENV, first_id: int = 100) -> list[Arrival]:
    return [Arrival(env_id, stored(first_id + i, size)) for i, size in enumerate(sizes)]


def state(*buffered: int, group_size: int = 4, batch_size: int = 8) -> IntakeState:
    buffer = tuple(stored(i, size) for i, size in enumerate(buffered))
    return IntakeState(batch_size, {ENV: group_size}, {ENV: buffer})


def bundles(placement: Placement) -> list[list[int]]:
    """Ids of the groups in each bundle."""
    return [[group.id for group in bundle.groups] for bundle in placement.bundles]


def left(placement: Placement) -> list[int]:
    return [part.id for part in placement.buffers[ENV]]


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ([], None),
        ([1, 1, 1], None),
        ([2, 2], [0, 1]),
        ([3, 1], [0, 1]),
        ([3, 2, 1], [0, 2]),
        ([1, 2, 3], [0, 2]),
        ([3, 2, 2], [1, 2]),
        ([3, 3, 3], None),
        ([1, 1, 3], [0, 2]),
    ],
)
def test_parts_that_complete_a_group_of_four(sizes: list[int], chosen: list[int] | None) -> None:
    assert completing_parts([stored(i, size) for i, size in enumerate(sizes)], 4) == chosen


def test_groups_of_the_registered_size_go_straight_to_the_queue() -> None:
    placement = place(arrivals(4, 4), state(3))
    assert bundles(placement) == [[100], [101]]
    assert placement.buffers == {}
    assert placement.buffered_sequences == [None, None]


@pytest.mark.parametrize("env_id", [None, 9], ids=["no env_id", "unknown env_id"])
def test_groups_of_nobody_known_go_straight_to_the_queue(env_id: int | None) -> None:
    assert bundles(place(arrivals(2, 1, env_id=env_id), state())) == [[100], [101]]


def test_a_part_waits() -> None:
    placement = place(arrivals(1), state(2))
    assert bundles(placement) == []
    assert left(placement) == [0, 100]
    assert placement.buffered_sequences == [3]


def test_a_part_that_completes_a_group_takes_the_others_along_in_order() -> None:
    placement = place(arrivals(1), state(2, 3, 1))
    assert bundles(placement) == [[0, 2, 100]]
    assert placement.bundles[0].id == 100
    assert left(placement) == [1]
    assert placement.buffered_sequences == [3]


def test_a_list_is_placed_in_its_order() -> None:
    placement = place(arrivals(3, 4, 1, 2), state())
    assert bundles(placement) == [[101], [100, 102]]
    assert left(placement) == [103]
    assert placement.buffered_sequences == [3, None, 0, 2]


def test_a_part_larger_than_the_group_is_refused() -> None:
    with pytest.raises(GroupRefused, match="registered group_size 4") as refused:
        place(arrivals(4, 5), state())
    assert refused.value.index == 1
    assert refused.value.at("tokens").status == 422


def test_a_size_that_fills_no_batch_is_refused_whoever_sends_it() -> None:
    for state_, sizes in ((state(group_size=3), [3]), (state(group_size=3), [1])):
        with pytest.raises(GroupRefused, match="exactly 8"):
            place(arrivals(*sizes), state_)
    with pytest.raises(GroupRefused, match="exactly 8"):
        place(arrivals(3, env_id=None), state())


def test_a_size_that_fills_a_batch_with_others_is_taken() -> None:
    with_partner = IntakeState(40, {ENV: 12}, {}, partners={8: 5, 12: 3})
    assert bundles(place(arrivals(12), with_partner)) == [[100]]
    assert place(arrivals(7), with_partner).buffered_sequences == [7]


def test_parts_that_never_match_are_refused_at_the_bound_and_keep_nobody_out() -> None:
    most = MAX_BUFFERED_GROUPS * 4 // 3
    full = state(*[3] * most)
    with pytest.raises(
        GroupRefused, match=f"{most * 3} sequences waiting in parts of 3"
    ) as refused:
        place(arrivals(3), full)
    assert refused.value.at("tokens").status == 409
    assert place(arrivals(2), full).buffered_sequences == [most * 3 + 2]
    assert bundles(place(arrivals(2, 2), full)) == [[100, 101]]
    assert bundles(place(arrivals(1), full)) == [[0, 100]]


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_lost_and_nothing_complete_waits(seed: int) -> None:
    dice = random.Random(seed)
    group_size = dice.choice([2, 4, 5, 8])
    buffer: Buffer = ()
    sent, queued = [], []
    for id_ in range(60):
        part = Arrival(ENV, stored(id_, dice.randint(1, group_size)))
        placement = place([part], IntakeState(group_size * 3, {ENV: group_size}, {ENV: buffer}))
        buffer = placement.buffers.get(ENV, buffer)
        sent.append(id_)
        queued += [group.id for bundle in placement.bundles for group in bundle.groups]
        assert all(bundle.sequences == group_size for bundle in placement.bundles)
        assert completing_parts(buffer, group_size) is None
        assert [part.id for part in buffer] == sorted(part.id for part in buffer)
    assert sorted([*queued, *(part.id for part in buffer)]) == sent
