"""Decides for each submitted group: into the queue, or into its environment's buffer.

A group of its environment's registered size is queued at once, as is one of an unknown environment.
A smaller group is a *part*. It waits in its environment's buffer until parts there add up to the
registered size; those are queued together as one bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_api.errors import GroupRefused
from grpo_api.planning.batch_plan import Bundle, StoredGroup, why_unservable
from grpo_api.planning.subset_sum import Kind, oldest_choice

MAX_BUFFERED_GROUPS = 16
"""An environment may buffer parts of one size worth this many whole groups.

Each size has its own limit, so parts that fit nothing cannot block the sizes that complete a group.
"""

Buffer = tuple[StoredGroup, ...]


@dataclass(frozen=True)
class BufferedRun:
    """The state of the run on which a placement depends.

    Attributes:
        group_size_of: registered group size by env_id.
        buffers: buffered parts by env_id, oldest first.
    """

    batch_size: int
    group_size_of: Mapping[int, int]
    buffers: Mapping[int, Buffer]


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


def place(
    env_ids: Sequence[int | None], groups: Sequence[StoredGroup], run: BufferedRun
) -> Placement:
    """Place all groups of a submission, in order, or none of them.

    Args:
        env_ids: the sender of each group.
    Raises:
        GroupRefused: for the first group that fits no batch, or whose buffer is full.
    """
    placement = Placement()
    for index, (env_id, group) in enumerate(zip(env_ids, groups, strict=True)):
        group_size = group.sequences if env_id is None else run.group_size_of.get(env_id)
        group_size = group_size or group.sequences
        _check_size(index, env_id, group, group_size, run.batch_size)
        if env_id is not None and group.sequences < group_size:
            _buffer(index, env_id, group, group_size, run, placement)
        else:
            # an unregistered env_id is not stored, so that invented ids do not add new kinds
            sender = env_id if env_id in run.group_size_of else None
            placement.bundles.append(Bundle(group.id, sender, (group,)))
            placement.buffered_sequences.append(None)
    return placement


def _check_size(
    index: int, env_id: int | None, group: StoredGroup, group_size: int, batch_size: int
) -> None:
    if group.sequences > group_size:
        raise GroupRefused(
            index,
            f"this group has {group.sequences} sequences, but environment {env_id} registered "
            f"group_size {group_size}; send groups of {group_size} sequences, or partial groups "
            f"that add up to {group_size}",
        )
    if reason := why_unservable(group_size, batch_size):
        raise GroupRefused(index, reason)


def _buffer(
    index: int,
    env_id: int,
    part: StoredGroup,
    group_size: int,
    run: BufferedRun,
    placement: Placement,
) -> None:
    waiting = placement.buffers.get(env_id, run.buffers.get(env_id, ()))
    parts = (*waiting, part)
    chosen = oldest_choice([Kind(None, one.sequences) for one in parts], group_size)
    if chosen is None:
        _check_room(index, env_id, part.sequences, waiting, group_size)
    else:
        completed = tuple(parts[i] for i in chosen)
        placement.bundles.append(Bundle(part.id, env_id, completed))
        parts = tuple(one for one in parts if one not in completed)
    placement.buffers[env_id] = parts
    placement.buffered_sequences.append(_sequences(parts))


def _check_room(index: int, env_id: int, size: int, waiting: Buffer, group_size: int) -> None:
    held = _sequences(part for part in waiting if part.sequences == size)
    if held + size > MAX_BUFFERED_GROUPS * group_size:
        raise GroupRefused(
            index,
            f"environment {env_id} has {held} sequences buffered in partial groups "
            f"of {size}, which never add up to group_size {group_size}; send partial groups "
            f"that add up to {group_size}, or delete the buffered groups with POST /disconnect-env",
            is_final=False,
        )


def _sequences(parts: Iterable[StoredGroup]) -> int:
    return sum(part.sequences for part in parts)
