"""Properties that every run must have after a fault."""

from __future__ import annotations

from typing import Any

from tests.faults.rig import MOVED, NOISE, Rig


def require_progress(rig: Rig, seen: int) -> None:
    """Check that steps are consecutive and every publication was served. Wait for a conclusive
    check: the previous weights would have failed it.

    Args: seen: steps recorded before the fault
    """

    def is_enough(records: list[dict[str, Any]]) -> bool:
        moved = [record.get("alignment/probe_moved", 0.0) for record in records]
        return len(records) >= rig.steps_until_proof and max(moved) > MOVED

    records = rig.wait_for(lambda: rig.records()[seen:], is_enough)
    steps = [record["step"] for record in records]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert max(record.get("alignment/probe_max", 0.0) for record in records) < NOISE


def require_every_batch_trained_once(rig: Rig) -> None:
    """Check the surviving steps: for each step number, the last one taken. They contain every batch
    once and in order, and no group twice. A batch that was delivered again has the same groups."""
    taken = rig.journal()
    line = {entry["step"]: entry for entry in taken}
    steps = range(1, taken[-1]["step"] + 1)
    assert [line[step]["batch"] for step in steps] == list(steps)
    content = {line[step]["batch"]: line[step]["groups"] for step in steps}
    groups = [group for batch in content.values() for group in batch]
    assert len(groups) == len(set(groups))
    for entry in taken:
        assert entry["groups"] == content.get(entry["batch"], entry["groups"])


def require_own_completions(taken: list[dict[str, Any]], epochs: set[int]) -> None:
    """Check that a trainer of this run published the weights that sampled each completion."""
    for entry in taken:
        assert entry["versions"]
        foreign = [v for v in entry["versions"] if v[0] not in epochs or v[1] > entry["step"]]
        assert not foreign, f"step {entry['step']} trains on completions of versions {foreign}"
