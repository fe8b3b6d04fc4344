"""Which group sizes a run can serve at all. Pure.

A batch holds exactly `batch_size` sequences and groups are never split, so a size is servable where
some number of groups of it, together with groups of other sizes, adds up to the batch. Where a size
divides the batch it needs nobody else. Where it does not (12 in a batch of 40), it needs partners
(8: 12 + 12 + 8 + 8), and those come and go. So registration refuses only what no partner could
help, a group larger than the batch, and every submission asks anew who is there: environments may
then start in any order, and data that nobody complements is refused instead of filling the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from grpo_api.planning.subset_sum import Kind, Stock, can_make

Partners = Mapping[int, int]
"""How many groups of each size a batch could get besides."""


def partners(batch_size: int, senders: Iterable[int], queued: Mapping[Kind, int]) -> Partners:
    """Any number from those who are connected; of what only lies in the queue, what lies there.

    Args:
        senders: group size of each connected environment.
        queued: groups in the queue, by kind.
    """
    available: dict[int, int] = {}
    for kind, groups in queued.items():
        available[kind.sequences] = available.get(kind.sequences, 0) + groups
    return available | {size: batch_size // size for size in senders}


def can_be_served(sequences: int, batch_size: int, others: Partners | None = None) -> bool:
    """Whether a batch can hold a group of `sequences`. Its sender may send any number of them."""
    rest = [Stock(size, 0, most) for size, most in (others or {}).items() if size != sequences]
    return can_make(batch_size, [Stock(sequences, 1, batch_size // sequences), *rest])


def why_unservable(sequences: int, batch_size: int, others: Partners | None = None) -> str:
    """What to tell the sender of a size that fails `can_be_served`."""
    if sequences > batch_size:
        return (
            f"a group of {sequences} sequences can never be served: batches hold exactly "
            f"{batch_size}; send smaller groups or register the trainer with a larger batch_size"
        )
    sizes = sorted(size for size in others or {} if size != sequences)
    besides = f", nor with groups of {', '.join(map(str, sizes))} beside it" if sizes else ""
    return (
        f"a group of {sequences} sequences cannot be served: batches hold exactly {batch_size}, "
        f"which groups of {sequences} do not fill{besides}; use a group size that divides "
        f"{batch_size}, or connect an environment whose groups fill the rest"
    )


def batch_size_conflicts(
    batch_size: int, group_size_of: Mapping[int, int], queued: Mapping[Kind, int]
) -> list[str]:
    """Why a batch size does not suit what a run holds: queued groups, connected environments.

    Args:
        group_size_of: env_id → group size of each connected environment.
        queued: groups in the queue, by kind.
    """
    others = partners(batch_size, group_size_of.values(), queued)
    unservable = {size for size in others if not can_be_served(size, batch_size, others)}
    lying = [
        f"groups of {size} sequences are queued"
        for size in sorted({kind.sequences for kind in queued} & unservable)
    ]
    coming = [
        f"environment {env_id} sends groups of {size}"
        for env_id, size in sorted(group_size_of.items())
        if size in unservable
    ]
    return lying + coming
