"""The pools of a run's curricula over the training steps."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import from_json

from grpo_core.curriculum import POOLS_FILE
from grpo_core.errors import ProtocolViolation
from grpo_core.rollouts.page.encode import Point
from grpo_runs.report.steps import GrowingFile


def pool_curves(directory: Path) -> dict[str, list[Point]]:
    """Steps and number of items, by names such as `curriculum/sums/hard`. Empty if there is no
    directory. If a resumed run repeats steps, the later lines count.

    Args: directory: with a directory for each environment

    Raises:
        ProtocolViolation: a line is not a record of the pools.
    """
    curves: dict[str, list[Point]] = {}
    for path in sorted(directory.glob(f"*/{POOLS_FILE}")):
        for number, line in enumerate(GrowingFile(path).new_lines(), start=1):
            try:
                record = from_json(line)
                step = record.pop("step")
                for name, count in record.items():
                    points = curves.setdefault(name, [])
                    while points and points[-1][0] >= step:
                        points.pop()
                    points.append((step, count))
            except (ValueError, TypeError, KeyError, AttributeError):
                raise ProtocolViolation(
                    f"{path} line {number}: expected a JSON object with the key step and numbers"
                ) from None
    return curves
