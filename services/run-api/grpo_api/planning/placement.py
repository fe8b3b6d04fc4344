"""Decides for each submitted group: into the queue, or into its environment's buffer.

A group of its environment's registered size is queued at once, as is one of an unknown environment.
A smaller group is a *part*. It waits in its environment's buffer until parts there add up to the
registered size; those are queued as one entry. Parts that were queued one by one could get stuck: a
part of 3 fits no batch once its part of 1 went into another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_api.errors import GroupRefused
from grpo_api.planning.batch_plan import Kind, oldest_choice, why_unservable
from grpo_core.wire.policy_version import PolicyVersion

MAX_BUFFERED_GROUPS = 16
"""An environment may buffer parts of one size worth this many whole groups.

Each size has its own limit, so parts that fit nothing cannot block the sizes that complete a group.
"""


@dataclass(frozen=True)
class StoredGroup:
    """Metadata of a group, or of a part, whose payload Redis stores under `id`.

        StoredGroup(301, sequences=8, stored_bytes=5120, received_under=PolicyVersion(1, 9))

    Later groups have higher ids. An entry of the queue is one whole group, or the parts of one.

    `received_under`: the policy version that was served when run-api received the group; None if
    it was unknown.
    """

    id: int
    sequences: int
    stored_bytes: int
    received_under: PolicyVersion | None = None


Groups = tuple[StoredGroup, ...]


@dataclass
class Placement:
    """Where the groups of one submission go."""

    entries: list[tuple[Kind, Groups]] = field(default_factory=list)
    """To be queued, in this order: the kind, and one whole group or the parts of one."""
    buffers: dict[int, Groups] = field(default_factory=dict)
    """New content of each buffer that changes, by env_id."""
    buffered_sequences: list[int | None] = field(default_factory=list)
    """For each group, the sequences in its environment's buffer afterwards; None if the group was
    queued directly."""


def place(
    env_ids: Sequence[int | None],
    groups: Sequence[StoredGroup],
    batch_size: int,
    group_size_of: Mapping[int, int],
    buffers: Mapping[int, Groups],
) -> Placement:
    """Place all groups of a submission, in order, or none of them.

    Args:
        env_ids: the sender of each group.
        group_size_of: registered group size by env_id.
        buffers: buffered parts by env_id, oldest first.
    Raises:
        GroupRefused: for the first group that fits no batch, or whose buffer is full.
    """
    placement = Placement()
    for index, (env_id, group) in enumerate(zip(env_ids, groups, strict=True)):
        # An unregistered env_id is not stored, so that invented ids do not add new kinds.
        sender = env_id if env_id in group_size_of else None
        size = group.sequences if sender is None else group_size_of[sender]
        whole = Kind(sender, size)
        if reason := _why_unfit(group, whole, batch_size):
            raise GroupRefused(index, reason)
        if group.sequences == whole.sequences:
            placement.entries.append((whole, (group,)))
            placement.buffered_sequences.append(None)
        else:
            _buffer(index, group, whole, buffers, placement)
    return placement


def _why_unfit(group: StoredGroup, whole: Kind, batch_size: int) -> str | None:
    if group.sequences > whole.sequences:
        return (
            f"this group has {group.sequences} sequences, but environment {whole.env_id} "
            f"registered group_size {whole.sequences}; send groups of {whole.sequences} sequences, "
            f"or partial groups that add up to {whole.sequences}"
        )
    return why_unservable(whole.sequences, batch_size)


def _buffer(
    index: int,
    part: StoredGroup,
    whole: Kind,
    buffers: Mapping[int, Groups],
    placement: Placement,
) -> None:
    """Add a part to its environment's buffer, and queue the parts that it completes.

    Args:
        whole: the kind of a group that parts of this environment add up to.
    """
    env_id, group_size = whole
    assert env_id is not None
    waiting = placement.buffers.get(env_id, buffers.get(env_id, ()))
    parts = (*waiting, part)
    chosen = oldest_choice([Kind(None, one.sequences) for one in parts], group_size)
    if chosen is not None:
        completed = tuple(parts[i] for i in chosen)
        placement.entries.append((whole, completed))
        parts = tuple(one for one in parts if one not in completed)
    else:
        alike = _sequences(one for one in waiting if one.sequences == part.sequences)
        if alike + part.sequences > MAX_BUFFERED_GROUPS * group_size:
            raise GroupRefused(
                index,
                f"environment {env_id} has {alike} sequences buffered in partial groups "
                f"of {part.sequences}, which never add up to group_size {group_size}; send partial "
                f"groups that add up to {group_size}, or delete the buffered groups with "
                "POST /disconnect-env",
                is_final=False,
            )
    placement.buffers[env_id] = parts
    placement.buffered_sequences.append(_sequences(parts))


def _sequences(parts: Iterable[StoredGroup]) -> int:
    return sum(part.sequences for part in parts)
