"""Where submitted groups go: to the queue, or into their environment's buffer. Pure.

A group of the size that its environment registered is queued, and so is one whose environment is
not known. A smaller one is a *part*: it waits in its environment's buffer until some of the parts
there add up to the registered size, and those are queued together, as one bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_api.errors import GroupRefused
from grpo_api.planning.batch import Bundle, StoredGroup
from grpo_api.planning.quotas import why_unservable
from grpo_api.planning.subset_sum import Kind, oldest_choice

MAX_BUFFERED_GROUPS = 16
"""Of one size, an environment may keep as many parts waiting as would fill so many of its groups.

The bound is per size, so that parts which never find a match cannot keep those out that would: what
completes a group takes at most one group's worth of any size, and that much always has room.
"""

Buffer = tuple[StoredGroup, ...]


@dataclass(frozen=True)
class Arrival:
    """A submitted group under the id that its payload will be stored by."""

    env_id: int | None
    group: StoredGroup


@dataclass(frozen=True)
class IntakeState:
    """What placing depends on.

    Attributes:
        group_size_of: registered group size of every sender that is known, by env_id.
        buffers: parts that wait, oldest first, by env_id.
    """

    batch_size: int
    group_size_of: Mapping[int, int]
    buffers: Mapping[int, Buffer]

    def bundle_size(self, arrival: Arrival) -> int:
        """Sequences of the bundle that the group will be served in."""
        own = arrival.group.sequences
        return own if arrival.env_id is None else self.group_size_of.get(arrival.env_id, own)

    def sender(self, arrival: Arrival) -> int | None:
        """Ids that nobody registered are one sender, or they could make kinds without end."""
        return arrival.env_id if arrival.env_id in self.group_size_of else None


@dataclass
class Placement:
    """Bundles to queue, in order; the buffers that change; and for each arrival the sequences that
    its environment has buffered after it, or None where it was queued as it came."""

    bundles: list[Bundle] = field(default_factory=list)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    buffered_sequences: list[int | None] = field(default_factory=list)


def place(arrivals: Sequence[Arrival], state: IntakeState) -> Placement:
    """Decide for all groups of a submission, in order.

    Raises:
        GroupRefused: the first group that can never be served, or whose buffer is full. Nothing
            of the submission is placed.
    """
    placement = Placement()
    for index, arrival in enumerate(arrivals):
        _check_size(index, arrival, state)
        if state.bundle_size(arrival) != arrival.group.sequences:
            _buffer(index, arrival, state, placement)
        else:
            placement.bundles.append(
                Bundle(arrival.group.id, state.sender(arrival), (arrival.group,))
            )
            placement.buffered_sequences.append(None)
    return placement


def _check_size(index: int, arrival: Arrival, state: IntakeState) -> None:
    size, own = state.bundle_size(arrival), arrival.group.sequences
    if own > size:
        raise GroupRefused(
            index,
            f"a group of {own} sequences, but environment {arrival.env_id} registered group_size "
            f"{size}: smaller groups are put together to that size, a larger one can never be",
        )
    if reason := why_unservable(size, state.batch_size):
        raise GroupRefused(index, reason)


def _buffer(index: int, arrival: Arrival, state: IntakeState, placement: Placement) -> None:
    env_id, group_size = arrival.env_id, state.bundle_size(arrival)
    assert env_id is not None  # a sender without an id has no registered size to differ from
    waiting = placement.buffers.get(env_id, state.buffers.get(env_id, ()))
    parts = (*waiting, arrival.group)
    chosen = oldest_choice([Kind(None, part.sequences) for part in parts], group_size)
    if chosen is None:
        _check_room(index, arrival, waiting, group_size)
    else:
        completed = tuple(parts[i] for i in chosen)
        placement.bundles.append(Bundle(arrival.group.id, env_id, completed))
        parts = tuple(part for part in parts if part not in completed)
    placement.buffers[env_id] = parts
    placement.buffered_sequences.append(_sequences(parts))


def _check_room(index: int, arrival: Arrival, waiting: Buffer, group_size: int) -> None:
    size = arrival.group.sequences
    held = _sequences(part for part in waiting if part.sequences == size)
    if held + size > MAX_BUFFERED_GROUPS * group_size:
        raise GroupRefused(
            index,
            f"environment {arrival.env_id} has {held} sequences waiting in parts of {size}, and "
            f"nothing that completes them to its group_size {group_size}; send parts that do, or "
            "POST /disconnect-env to drop them",
            is_final=False,
        )


def _sequences(parts: Iterable[StoredGroup]) -> int:
    return sum(part.sequences for part in parts)
