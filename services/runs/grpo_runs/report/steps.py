"""Training steps: their records in the trainer's metrics file, which grows, a line for each on the
screen, a hint, and the curves of the curricula's pools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Generic, TypeVar

from pydantic import BaseModel, Field
from pydantic_core import from_json

from grpo_core.curriculum import POOLS_FILE
from grpo_core.errors import ProtocolViolation, parsing
from grpo_core.rollouts.page.encode import MFU, Point
from grpo_runs.watch.followed_file import FollowedFile

Record = TypeVar("Record")


class StepRecord(BaseModel, frozen=True):
    """Measurements of one training step. Other keys of the file are ignored."""

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
    reverse_kl: float | None = Field(None, alias="distill/reverse_kl")
    generation_s: float | None = Field(None, alias="rollout/generation_time")
    tokens_per_s: float = Field(alias="throughput/tokens_per_s")
    fetch_s: float = Field(alias="train/data_fetch_time")
    compute_s: float = Field(alias="train/compute_time")
    sync_s: float = Field(alias="train/sync_time")
    publication_servers: int | None = Field(None, alias="publication/servers")
    """That served the new weights when the step went on; None if none were published as files."""
    all_serve_s: float | None = Field(None, alias="publication/all_serve_time")
    """None if the step did not wait for all of them."""
    servers_left: int = Field(0, alias="publication/servers_left")
    repeated_announcements: int = Field(0, alias="publication/repeated_announcements")
    unanswered_checks: int = Field(0, alias="publication/unanswered_checks")
    by_files: int = Field(0, alias="publication/by_files")
    step_s: float = Field(alias="train/step_time")

    @property
    def is_late(self) -> bool:
        """Whether the step went on before all servers served the new weights."""
        return self.publication_servers is not None and self.all_serve_s is None


class MetricsFile(FollowedFile):
    """The trainer's metrics file. The trainer may be writing its last line."""

    def read_new(self) -> list[StepRecord]:
        """New records since the last call; none if there is no file.

        Raises:
            ProtocolViolation: a complete line is not a step record. Names the line.
        """
        return [self._parse(line) for line in self.read()]

    def _parse(self, line: bytes) -> StepRecord:
        where = f"{self.path} line {self.number}"
        with parsing(f"{where}: the record of a training step has missing or invalid fields"):
            return StepRecord.model_validate_json(line)


def numbers_of(line: str | bytes) -> dict[str, float]:
    """The metrics of a step that are finite numbers.

    Raises:
        ValueError: the line is no JSON object with the number `step`.
    """
    record = from_json(line)
    if not isinstance(record, dict):
        raise ValueError("expected a JSON object")
    found = {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max
    }
    if "step" not in found:
        raise ValueError("expected the key step")
    return found


def speed_text(numbers: Mapping[str, float]) -> str | None:
    """`5,120 tokens/s, MFU 41 % of the 790 TFLOP/s measured`; None if a step has no such metrics.

    Args: numbers: metrics of a step
    """
    if MFU not in numbers:
        return None
    return (
        f"{numbers['train/tokens_per_s']:,.0f} tokens/s, MFU {100 * numbers[MFU]:.3g} % of the "
        f"{numbers['train/device_tflops']:.3g} TFLOP/s measured"
    )


def pool_curves(directory: Path) -> dict[str, list[Point]]:
    """Steps and number of items, by names such as `curriculum/sums/hard`. Empty if there is no
    directory. If a resumed run repeats steps, the later lines count.

    Args: directory: with a directory for each environment

    Raises:
        ProtocolViolation: a line is not a record of the pools.
    """
    curves: dict[str, list[Point]] = {}
    for path in sorted(directory.glob(f"*/{POOLS_FILE}")):
        for number, line in enumerate(FollowedFile(path).new_lines(), start=1):
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


def trim_records(path: Path, steps: int) -> list[StepRecord]:
    """Remove the records of later steps than `steps` from the file; returns the others.

    Raises:
        ProtocolViolation: a line is not a step record.
    """
    lines = FollowedFile(path).new_lines()
    records = MetricsFile(path).read_new()
    kept = {r.step: line for r, line in zip(records, lines, strict=True) if r.step <= steps}
    if len(kept) < len(lines):
        path.write_text("".join(f"{line}\n" for line in kept.values()))
    return [record for record in records if record.step <= steps]


HEADER_EVERY_STEPS = 20
NOT_MEASURED = "-"
_INDENT = "  "
_GAP = "  "


@dataclass(frozen=True)
class Column(Generic[Record]):
    """Of a table that grows by a line per record."""

    title: str
    width: int
    value: Callable[[Record], str]
    unit: str = ""
    meaning: str = ""


def titles(columns: Sequence[Column[Record]]) -> str:
    return _GAP.join(column.title.rjust(column.width) for column in columns)


def cells(columns: Sequence[Column[Record]], record: Record) -> str:
    return _GAP.join(column.value(record).rjust(column.width) for column in columns)


def optional(value: float | None, form: str, scale: float = 1.0) -> str:
    return NOT_MEASURED if value is None else format(scale * value, form)


def seconds(value: float | None) -> str:
    """Two decimals below 100 s and none above, so that long times fit the column too."""
    return optional(value, ".2f" if value is None or value < 99.995 else ".0f")


STEP_COLUMNS: Sequence[Column[StepRecord]] = (
    Column("step", 7, lambda r: f"{r.step}/{r.steps}", "", "training steps done / in all"),
    Column("reward", 7, lambda r: f"{r.reward_mean:.3f}", "mean", "mean reward of the completions"),
    Column(
        *("loss", 8, lambda r: f"{r.loss:.4f}", ""),
        "the loss; that of GRPO stays near 0 even while the reward rises",
    ),
    Column(
        *("ratio", 6, lambda r: optional(r.mean_ratio, ".3f"), "mean"),
        "importance ratio: a token's probability now / when it was sampled",
    ),
    Column(
        *("clip", 5, lambda r: optional(r.clipped_fraction, ".1f", scale=100.0), "%"),
        "tokens whose importance ratio is outside the clipping range",
    ),
    Column(
        *("align", 7, lambda r: optional(r.alignment_abs_mean, ".1e"), "nats"),
        "mean difference between the logprobs of trainer and server",
    ),
    Column(
        *("stale", 5, lambda r: optional(r.staleness_mean, ".2f"), "steps"),
        "mean number of updates since the completions were sampled",
    ),
    Column(
        *("speed", 6, lambda r: f"{r.tokens_per_s:.0f}", "tok/s"),
        "prompt and completion tokens per second",
    ),
    Column(
        *("generate", 8, lambda r: seconds(r.generation_s), "s"),
        "time to sample one group (mean)",
    ),
    Column("wait", 5, lambda r: seconds(r.fetch_s), "s", "time the trainer waited for its batch"),
    Column(
        *("train", 5, lambda r: seconds(r.compute_s), "s"),
        "time to compute gradients and the update",
    ),
    Column(
        *("publish", 7, lambda r: seconds(r.sync_s), "s"),
        "time to publish the new weights and check the served weights",
    ),
)


REVERSE_KL = Column[StepRecord](
    *("reverse_kl", 10, lambda r: optional(r.reverse_kl, ".4f"), "nats"),
    "mean divergence of the policy from the teacher, over the tokens that it scored",
)


def columns_of(record: StepRecord) -> Sequence[Column[StepRecord]]:
    return STEP_COLUMNS if record.reverse_kl is None else (*STEP_COLUMNS, REVERSE_KL)


def legend_lines(record: StepRecord) -> list[str]:
    """The meaning of each column."""
    columns = columns_of(record)
    width = max(len(column.title) for column in columns)
    meanings = (f"{_INDENT}{column.title:<{width}}  {column.meaning}" for column in columns)
    return [f"training; the columns are ({NOT_MEASURED}: not measured):", *meanings]


def header_lines(record: StepRecord) -> list[str]:
    """Titles, and their units below."""
    columns = columns_of(record)
    units = _GAP.join(column.unit.rjust(column.width) for column in columns)
    return [titles(columns), units]


def step_line(record: StepRecord) -> str:
    return cells(columns_of(record), record)


FIRST_STEPS = 10
_STILL = 1e-3
"""A mean importance ratio this close to 1 means that the policy has hardly moved."""


def flat_start_hint(first: Sequence[StepRecord], lr: float) -> str | None:
    """The line to show after `FIRST_STEPS` steps, if neither the policy nor the reward has moved.

    The reward counts as flat if the means of both halves differ by less than the standard error of
    their difference.
    """
    if len(first) != FIRST_STEPS:
        return None
    ratios = [record.mean_ratio for record in first if record.mean_ratio is not None]
    rewards = [record.reward_mean for record in first]
    half = FIRST_STEPS // 2
    error = stdev(rewards) * (2 / half) ** 0.5
    has_moved = abs(fmean(rewards[half:]) - fmean(rewards[:half])) > error
    if has_moved or any(abs(ratio - 1) > _STILL for ratio in ratios):
        return None
    return (
        f"hint: in {FIRST_STEPS} steps neither the policy (ratio 1.000) nor the reward has moved. "
        f"If this goes on, raise --lr (now {lr:g}) threefold, or look at the rewards in the "
        "rollouts: prompts that are always or never solved teach nothing"
    )
