"""The trainer's metrics file, read while it grows: one JSON object per line, one line per step."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_core.errors import ProtocolViolation


class StepRecord(BaseModel):
    """What the trainer measured in one step. Keys that are not listed here are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int = Field(ge=1)
    steps: int = Field(ge=1)
    time_s: float = 0.0
    """Since the first step began, by the end of this one."""
    reward_mean: float = Field(alias="reward/mean")
    loss: float = Field(alias="train/loss")
    # None where nothing was trained on, or nothing was said to compare with.
    mean_ratio: float | None = Field(None, alias="grpo/mean_ratio")
    clipped_fraction: float | None = Field(None, alias="grpo/clipped_fraction")
    alignment_abs_mean: float | None = Field(None, alias="alignment/diff_abs_mean")
    staleness_mean: float | None = Field(None, alias="staleness/mean")
    staleness_max: float | None = Field(None, alias="staleness/max")
    generation_s: float | None = Field(None, alias="rollout/generation_time")
    tokens_per_s: float = Field(alias="throughput/tokens_per_s")
    fetch_s: float = Field(alias="train/data_fetch_time")
    compute_s: float = Field(alias="train/compute_time")
    sync_s: float = Field(alias="train/sync_time")
    step_s: float = Field(alias="train/step_time")


class MetricsFile:
    """One that is still being written waits for the end of its line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GrowingFile(path)
        self._lines = 0

    def read_new(self) -> list[StepRecord]:
        """The records that were completed since the last call; none while there is no file.

        Raises:
            ProtocolViolation: a complete line is not a step record. Names the line.
        """
        return [self._parse(line) for line in self._file.new_lines()]

    def _parse(self, line: str) -> StepRecord:
        self._lines += 1
        try:
            return StepRecord.model_validate_json(line)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'line'}: {problem['msg']}"
                for problem in error.errors()
            )
            raise ProtocolViolation(f"{self._path} line {self._lines}: {problems}") from None


class GrowingFile:
    """Remembers how far it has read; a line that is still being written waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0  # bytes, always just behind a newline

    def new_lines(self) -> list[str]:
        """The lines that were completed since the last call; none while there is no file."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].decode(errors="replace").splitlines()
