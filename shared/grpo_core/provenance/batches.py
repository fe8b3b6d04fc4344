"""Recorded batches: what the trainer took from run-api for each step, enough to compute the step
again. `batches/step-000012.jsonl.gz` holds the `StepInput`, then one scored group per line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from grpo_core.errors import BrokenProvenance, problems_of
from grpo_core.rollouts.files import file_of_step, write_lines
from grpo_core.wire.scored_group import ScoredGroup

BATCHES = "batches"
"""Name of the directory, below --save-path."""
_UNUSED = {"messages", "images", "ref_logprobs"}
"""Fields that no step depends on. The rollouts have the messages."""


class StepInput(BaseModel, frozen=True, extra="forbid"):
    """What a step depends on besides its groups, the weights and the options.

    Args:
        step: counted from 1
        kl_coef, maxent_tau: the objective's coefficients in this step
        loss_scale: None if no scale is used
        random: state of the random generators; None if the step uses none
    """

    step: int
    batch_id: int
    kl_coef: float
    maxent_tau: float
    loss_scale: dict[str, Any] | None = None
    random: dict[str, Any] | None = None


@dataclass(frozen=True)
class RecordedBatch:
    """`groups`: those that were trained on, in order"""

    step: StepInput
    groups: Sequence[ScoredGroup]


def write_batch(directory: Path, batch: RecordedBatch, keep: int) -> Path:
    """Write a step's file completely or not at all, replacing an earlier one, then remove the files
    of the oldest steps beyond `keep`. Raises `OSError`."""
    rows = [group.model_dump_json(exclude=_UNUSED, exclude_none=True) for group in batch.groups]
    text = "".join(f"{row}\n" for row in (batch.step.model_dump_json(), *rows))
    return write_lines(directory, batch.step.step, text.encode(), keep)


def read_batch(directory: Path, step: int) -> RecordedBatch:
    """Raises `BrokenProvenance`: the file is missing or cannot be read."""
    path = file_of_step(directory, step)
    try:
        with gzip.open(path, "rb") as file:
            head, *rows = file.read().splitlines()
        return RecordedBatch(
            StepInput.model_validate_json(head),
            [ScoredGroup.model_validate_json(row) for row in rows],
        )
    except ValidationError as error:
        raise BrokenProvenance(f"{path}: {problems_of(error)}") from None
    except (EOFError, zlib.error, OSError, ValueError) as error:
        raise BrokenProvenance(f"{path}: {error}") from error
