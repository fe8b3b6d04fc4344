"""Reads the trainer's metrics file while it grows: one JSON object per line, one line per step."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_core.errors import ProtocolViolation


class StepRecord(BaseModel):
    """Measurements of one training step. Other keys of the file are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int = Field(ge=1)
    steps: int = Field(ge=1)
    time_s: float = 0.0
    """From the start of the first step to the end of this one."""
    reward_mean: float = Field(alias="reward/mean")
    loss: float = Field(alias="train/loss")
    # None if no token was trained on, or if the server reported nothing to compare with.
    mean_ratio: float | None = Field(None, alias="grpo/mean_ratio")
    clipped_fraction: float | None = Field(None, alias="grpo/clipped_fraction")
    alignment_abs_mean: float | None = Field(None, alias="alignment/diff_abs_mean")
    staleness_mean: float | None = Field(None, alias="staleness/mean")
    generation_s: float | None = Field(None, alias="rollout/generation_time")
    tokens_per_s: float = Field(alias="throughput/tokens_per_s")
    fetch_s: float = Field(alias="train/data_fetch_time")
    compute_s: float = Field(alias="train/compute_time")
    sync_s: float = Field(alias="train/sync_time")
    step_s: float = Field(alias="train/step_time")


class MetricsFile:
    """Reads complete lines only: the trainer may be writing the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GrowingFile(path)
        self._lines = 0

    def read_new(self) -> list[StepRecord]:
        """New records since the last call; none if there is no file.

        Raises:
            ProtocolViolation: a complete line is not a step record. Names the line.
        """
        return [self._parse(line) for line in self._file.new_lines()]

    def _parse(self, line: str) -> StepRecord:
        self._lines += 1
        try:
            return StepRecord.model_validate_json(line)
        except ValidationError as error:
            keys = ", ".join(
                ".".join(map(str, problem["loc"])) or "all (not a JSON object)"
                for problem in error.errors()
            )
            raise ProtocolViolation(
                f"{self._path} line {self._lines}: the record of a training step has missing or "
                f"invalid fields: {keys}"
            ) from None


class GrowingFile:
    """A text file that another process appends to. Only complete lines are read.

    Args: offset: bytes to skip, which end with a newline
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset

    def new_lines(self) -> list[str]:
        """New lines since the last call; none if there is no file."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].decode(errors="replace").splitlines()


def metric_curves(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Steps and values of every metric, in order of steps; of a repeated step, the last values.
    Empty if there is no file.

    Raises:
        ProtocolViolation: a complete line is not the record of a step.
    """
    records: dict[int, dict[str, float]] = {}
    for number, line in enumerate(GrowingFile(path).new_lines(), start=1):
        try:
            record = json.loads(line)
            records[int(record["step"])] = record
        except (ValueError, TypeError, KeyError):
            raise ProtocolViolation(
                f"{path} line {number}: expected the record of a training step, a JSON object with "
                "the key step"
            ) from None
    curves: dict[str, list[tuple[float, float]]] = {}
    for step, record in sorted(records.items()):
        for name, value in record.items():
            if isinstance(value, int | float):
                curves.setdefault(name, []).append((step, value))
    return curves


def trim_records(path: Path, steps: int) -> list[StepRecord]:
    """Remove the records of later steps than `steps` from the file; returns the others.

    Raises:
        ProtocolViolation: a line is not a step record.
    """
    lines = GrowingFile(path).new_lines()
    records = MetricsFile(path).read_new()
    kept = {r.step: line for r, line in zip(records, lines, strict=True) if r.step <= steps}
    if len(kept) < len(lines):
        path.write_text("".join(f"{line}\n" for line in kept.values()))
    return [record for record in records if record.step <= steps]
