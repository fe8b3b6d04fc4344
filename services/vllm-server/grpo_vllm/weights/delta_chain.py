"""Chooses the deltas that lead from a version on this host to the wanted one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grpo_core.weights.versions import Announcement, Manifest, VersionKind


def chain_of(
    wanted: Announcement, known: Iterable[Announcement], held: Iterable[str]
) -> list[Announcement]:
    """The deltas that lead from one of the held ids to `wanted`, oldest first; empty if one of them
    is missing."""
    by_id, usable = {each.id: each for each in known}, set(held)
    chain = [wanted]
    while chain[0].kind is VersionKind.DELTA and chain[0].parent not in usable:
        parent = by_id.get(chain[0].parent)
        if parent is None:
            return []
        chain.insert(0, parent)
    return chain if chain[0].kind is VersionKind.DELTA else []


def folded_bytes(chain: Sequence[Manifest]) -> int:
    """What is fetched to fold the deltas of a chain; 0 for no chain."""
    if not chain:
        return 0
    folded = folded_files(chain)
    whole = sum(parts.bytes for name, parts in chain[-1].files.items() if name not in folded)
    return whole + sum(each.deltas[name].bytes for each in chain for name in folded)


def folded_files(chain: Sequence[Manifest]) -> set[str]:
    """Files that have a delta in every version of the chain."""
    return set(chain[-1].files).intersection(*(each.deltas for each in chain))
