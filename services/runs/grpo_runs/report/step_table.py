"""One line per training step, in columns that fit a terminal of 100 characters; and a hint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from grpo_runs.report.metrics_file import StepRecord

HEADER_EVERY_STEPS = 20
NOT_MEASURED = "-"
_INDENT = "  "
_GAP = "  "


@dataclass(frozen=True)
class Column:
    title: str
    unit: str
    width: int
    meaning: str
    value: Callable[[StepRecord], str]


def optional(value: float | None, form: str, scale: float = 1.0) -> str:
    return NOT_MEASURED if value is None else format(scale * value, form)


def seconds(value: float | None) -> str:
    """Two decimals below 100 s and none above, so that long times fit the column too."""
    return optional(value, ".2f" if value is None or value < 99.995 else ".0f")


COLUMNS = (
    Column("step", "", 7, "training steps done / in all", lambda r: f"{r.step}/{r.steps}"),
    Column("reward", "mean", 7, "mean reward of the completions", lambda r: f"{r.reward_mean:.3f}"),
    Column(
        "loss",
        "",
        8,
        "GRPO's loss, which stays near 0 even while the reward rises",
        lambda r: f"{r.loss:.4f}",
    ),
    Column(
        "ratio",
        "mean",
        6,
        "importance ratio: a token's probability now / when it was sampled",
        lambda r: optional(r.mean_ratio, ".3f"),
    ),
    Column(
        "clip",
        "%",
        5,
        "tokens whose importance ratio is outside the clipping range",
        lambda r: optional(r.clipped_fraction, ".1f", scale=100.0),
    ),
    Column(
        "align",
        "nats",
        7,
        "mean difference between the logprobs of trainer and server",
        lambda r: optional(r.alignment_abs_mean, ".1e"),
    ),
    Column(
        "stale",
        "steps",
        5,
        "mean number of updates since the completions were sampled",
        lambda r: optional(r.staleness_mean, ".2f"),
    ),
    Column(
        "speed",
        "tok/s",
        6,
        "prompt and completion tokens per second",
        lambda r: f"{r.tokens_per_s:.0f}",
    ),
    Column(
        "generate", "s", 8, "time to sample one group (mean)", lambda r: seconds(r.generation_s)
    ),
    Column("wait", "s", 5, "time the trainer waited for its batch", lambda r: seconds(r.fetch_s)),
    Column(
        "train", "s", 5, "time to compute gradients and the update", lambda r: seconds(r.compute_s)
    ),
    Column(
        "publish",
        "s",
        7,
        "time to publish the new weights and check the served weights",
        lambda r: seconds(r.sync_s),
    ),
)


def legend_lines() -> list[str]:
    """The meaning of each column."""
    width = max(len(column.title) for column in COLUMNS)
    meanings = (f"{_INDENT}{column.title:<{width}}  {column.meaning}" for column in COLUMNS)
    return [f"training; the columns are ({NOT_MEASURED}: not measured):", *meanings]


def header_lines() -> list[str]:
    """Titles, and their units below."""
    return [
        _GAP.join(column.title.rjust(column.width) for column in COLUMNS),
        _GAP.join(column.unit.rjust(column.width) for column in COLUMNS),
    ]


def step_line(record: StepRecord) -> str:
    return _GAP.join(column.value(record).rjust(column.width) for column in COLUMNS)


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
