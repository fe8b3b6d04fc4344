"""A few sequences of a step as a small table for Weights & Biases."""

from __future__ import annotations

import json
from typing import Any

from grpo_core.rollouts.record import RolloutRecord
from grpo_core.rollouts.text import split_conversation, text_of
from grpo_core.wandb_run.sink import Table
from grpo_trainer.telemetry.rollout_records import StepRollouts

EVERY_STEPS = 10
ROWS = 8
MAX_CHARS = 1000
"""Of each text."""
MAX_BYTES = 32 * 1024
"""Half of the smallest pipe to W&B. A table that does not fit into the pipe would end W&B's run."""
NAME = "rollouts/samples"
COLUMNS = ["step", "task", "prompt", "completion", "score", "advantage", "reason"]


def samples_are_due(step: int) -> bool:
    """Args: step: counted from 1"""
    return step == 1 or step % EVERY_STEPS == 0


def sample_table(rollouts: StepRollouts) -> Table:
    """Sequences whose scores range from the step's worst to its best."""
    places = [
        (score, group, index)
        for group, usable in enumerate(rollouts.groups)
        for index, score in enumerate(usable.group.scores)
    ]
    places.sort()
    count = min(ROWS, len(places))
    chosen = [places[i * (len(places) - 1) // max(1, count - 1)] for i in range(count)]
    records = [rollouts.records_of(group)[index] for _, group, index in chosen]
    limit = MAX_CHARS
    while True:
        rows = [_row(record, limit) for record in records]
        if limit == 0 or len(json.dumps(rows)) <= MAX_BYTES:
            return Table(NAME, rollouts.step, COLUMNS, rows)
        limit //= 2


def _row(record: RolloutRecord, limit: int) -> list[Any]:
    prompt, completion = map(text_of, split_conversation(record))
    if not record.messages:
        ids = [str(token) for token in record.tokens]
        prompt, completion = "", f"token ids: {' '.join(ids)}"
    return [
        record.step,
        _shortened(record.task or "", limit),
        _shortened(prompt, limit),
        _shortened(completion, limit),
        record.score,
        record.advantage,
        _shortened(record.reason or "", limit),
    ]


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
