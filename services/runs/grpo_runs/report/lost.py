"""The groups that a run lost, by reason and by item."""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from grpo_core.rollouts.files import LOST_GROUPS
from grpo_core.rollouts.record import printable
from grpo_runs.run_directory import RunDirectory

_SHOWN = 3


def lost_lines(run: RunDirectory) -> list[str]:
    """All losses by reason, then the items that lost most; empty if none was lost.

    lost:     5 failed_rollout, 1 too_long, of 4 items; lines in runs/latest/untrained/*/lost.jsonl
              3 of 4 attempts at training row 8 of my.jsonl: 2 failed_rollout, 1 too_long
    """
    files = sorted(run.untrained.glob(f"*/{LOST_GROUPS}"))
    lost = []
    for line in (line for file in files for line in file.read_text().split("\n")):
        with contextlib.suppress(json.JSONDecodeError):  # a full disk ends a line early
            lost.append(json.loads(line))
    items = defaultdict(list)
    for one in lost:
        items[one["task"], one["item"]].append(one)
    most = sorted(items.values(), key=len, reverse=True)[:_SHOWN]
    where = f"of {len(items)} items; lines in {run.untrained / '*' / LOST_GROUPS}"
    lines = [f"lost:     {_by_reason(lost)}, {where}", *map(_of_item, most)]
    return lines if lost else []


def _of_item(lost: Sequence[dict[str, Any]]) -> str:
    # A restarted environment counts its attempts from 1.
    tried = max(len(lost), *(one["attempt"] for one in lost))
    where = "{place} of {task}".format_map(lost[-1])
    return printable(f"          {len(lost)} of {tried} attempts at {where}: {_by_reason(lost)}")


def _by_reason(lost: Sequence[dict[str, Any]]) -> str:
    counts = Counter(one["reason"] for one in lost).most_common()
    return ", ".join(f"{count} {reason}" for reason, count in counts)
