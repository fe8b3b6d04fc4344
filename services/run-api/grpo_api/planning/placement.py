"""Decides for each submitted group: into the queue, or into its environment's buffer.

A group of its environment's registered size is queued at once, as is one of an unknown environment.
A smaller group is a *part*. It waits in its environment's buffer until parts there add up to the
registered size; those are queued together as one bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_api.errors import GroupRefused
from grpo_api.planning.batch import Bundle, StoredGroup, why_unservable
from grpo_api.planning.subset_sum import Kind, oldest_choice

MAX_BUFFERED_GROUPS = 16
"""An environment may buffer parts of one size worth this many whole groups.

Each size has its own limit, so parts that fit nothing cannot block the sizes that complete a group.
"""

Buffer = tuple[StoredGroup, ...]


@dataclass(frozen=True)
class Arrival:
    """A submitted group, with the id under which its payload will be stored."""

    env_id: int | None
    group: StoredGroup


@dataclass(frozen=True)
class IntakeState:
    """The state of the run on which a placement depends.

    Attributes:
        group_size_of: registered group size by env_id.
        buffers: buffered parts by env_id, oldest first.
    """

    batch_size: int
    group_size_of: Mapping[int, int]
    buffers: Mapping[int, Buffer]

    def bundle_size(self, arrival: Arrival) -> int:
        """Number of sequences in the bundle that the group will belong to."""
        own = arrival.group.sequences
        return own if arrival.env_id is None else self.group_size_of.get(arrival.env_id, own)

    def sender(self, arrival: Arrival) -> int | None:
        """The env_id; None if it is not registered, so that invented ids do not add new kinds."""
        return arrival.env_id if arrival.env_id in self.group_size_of else None


@dataclass
class Placement:
    """Where the groups of one submission go.

    Attributes:
        bundles: to be queued, in this order.
        buffers: new content of each buffer that changes, by env_id.
        buffered_sequences: for each group, the sequences in its environment's buffer afterwards;
            None if the group was queued directly.
    """

    bundles: list[Bundle] = field(default_factory=list)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    buffered_sequences: list[int | None] = field(default_factory=list)


def place(arrivals: Sequence[Arrival], state: IntakeState) -> Placement:
    """Place all groups of a submission, in order, or none of them.

    Raises:
        GroupRefused: for the first group that fits no batch, or whose buffer is full.
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
            f"this group has {own} sequences, but environment {arrival.env_id} registered "
            f"group_size {size}; send groups of {size} sequences, or partial groups that "
            f"add up to {size}",
        )
    if reason := why_unservable(size, state.batch_size):
        raise GroupRefused(index, reason)


def _buffer(index: int, arrival: Arrival, state: IntakeState, placement: Placement) -> None:
    env_id, group_size = arrival.env_id, state.bundle_size(arrival)
    assert env_id is not None  # without an env_id, the bundle size is the group's own size
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
            f"environment {arrival.env_id} has {held} sequences buffered in partial groups "
            f"of {size}, which never add up to group_size {group_size}; send partial groups "
            f"that add up to {group_size}, or delete the buffered groups with POST /disconnect-env",
            is_final=False,
        )


def _sequences(parts: Iterable[StoredGroup]) -> int:
    return sum(part.sequences for part in parts)
