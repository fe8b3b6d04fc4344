"""Options of the commands that show a run: `grpo-rollouts` and `grpo-report`."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator

from grpo_core.rollouts.files import steps_in
from grpo_core.rollouts.record import RolloutRecord
from grpo_core.settings import Command, CommandSettings, Mistake, Shown
from grpo_core.settings.machine import not_writable
from grpo_runs.run_directory import LATEST, RUNS, RunDirectory

ALL = "all"
SHOWN = 5


def _two_steps(value: Any) -> Any:
    """`1,40` or `1 40`"""
    if value is None:
        return None
    words = [value] if isinstance(value, str) else value
    steps = [part for word in words for part in str(word).split(",")]
    if len(steps) != 2:
        raise ValueError("expected two steps, for example --diff 1 40")
    return steps


class RolloutsSettings(CommandSettings):
    """Shows what the policy said in a run: the prompt and the completion of each sequence, its
    reward and the grader's reason. Without --step, shows sequences of the newest step."""

    command: ClassVar[Command] = Command(
        prog="grpo-rollouts",
        env_prefix="GRPO_ROLLOUTS_",
        groups={
            "Sequences": (
                "step",
                "task",
                "min_reward",
                "max_reward",
                "min_tokens",
                "max_tokens",
                "worst",
                "best",
                "limit",
            ),
            "Output": ("diff", "json_lines"),
        },
        examples=(
            "grpo-rollouts runs/latest --worst",
            "grpo-rollouts runs/latest --diff 1 40",
            "grpo-rollouts runs/latest --step 10-20 --max-reward 0 --json | jq .reason",
        ),
        positional=("run",),
        aliases={"json": "json_lines"},
    )

    run: Path = Field(
        RUNS / LATEST,
        description="Directory of a run, --save-path of a trainer, or a directory of rollouts",
    )
    step: Annotated[str | None, Shown(default="the newest step", metavar="N|A-B")] = Field(
        None, description="Step to show, or a range of steps such as 10-20, or all"
    )
    task: str | None = Field(None, description="Show only sequences of this task")
    min_reward: Annotated[float | None, Shown(default="no limit")] = Field(
        None, description="Show only sequences with at least this score"
    )
    max_reward: Annotated[float | None, Shown(default="no limit")] = Field(
        None, description="Show only sequences with at most this score"
    )
    min_tokens: Annotated[int | None, Shown(default="no limit")] = Field(
        None, ge=0, description="Show only completions with at least this number of tokens"
    )
    max_tokens: Annotated[int | None, Shown(default="no limit")] = Field(
        None, ge=0, description="Show only completions with at most this number of tokens"
    )
    worst: bool = Field(False, description="Show the sequences with the lowest scores first")
    best: bool = Field(False, description="Show the sequences with the highest scores first")
    limit: Annotated[int | None, Shown(default=f"{SHOWN}, or no limit with --json")] = Field(
        None, ge=1, description="Largest number of sequences to show, or of prompts with --diff"
    )
    diff: Annotated[
        tuple[int, int] | None, Shown(metavar="STEP STEP"), BeforeValidator(_two_steps)
    ] = Field(
        None,
        description="Compare two steps: the distributions of score, length and reward parts, and "
        "the completions of prompts that both steps have",
    )
    json_lines: bool = Field(
        False, description="Print one JSON object per sequence, with all recorded values"
    )

    @field_validator("step")
    @classmethod
    def _names_steps(cls, value: str | None) -> str | None:
        if value is not None and value != ALL:
            first, last = _range(value)
            if first > last:
                raise ValueError(f"{first} is after {last}; write {last}-{first}")
        return value

    def mistakes(self) -> Iterator[Mistake]:
        if self.worst and self.best:
            yield Mistake("best", "not together with --worst; omit one of them")
        if self.diff and self.step:
            yield Mistake("step", "not together with --diff, which names its steps; omit --step")
        if self.diff and self.json_lines:
            yield Mistake("diff", "not together with --json; omit one of them")

    def start_mistakes(self) -> Iterator[Mistake]:
        if not self.run.is_dir():
            yield Mistake("run", f"no such directory: {self.run}; name the directory of a run")
            return
        run = RunDirectory(self.run)
        directory = run.rollouts
        if directory is None:
            others = " or ".join(map(str, run.untrained_rollouts.values()))
            hint = "the directory of a run whose trainer wrote rollouts (--keep-rollouts above 0)"
            yield Mistake(
                "run",
                f"{self.run} contains no rollouts that were trained on; name {others or hint}",
            )
            return
        have = steps_in(directory)
        for step in [s for s in self.diff or () if s not in have]:
            yield Mistake("diff", f"no step {step}; {directory} has {_named(have)}")
        if not any(step in self.steps(have) for step in have):
            yield Mistake("step", f"no step {self.step}; {directory} has {_named(have)}")

    @property
    def directory(self) -> Path:
        """The directory of rollouts, which must be there."""
        return RunDirectory(self.run).rollouts or self.run

    def steps(self, have: list[int]) -> Container[int]:
        """The steps to show, of those that the directory has."""
        if self.step is None:
            return have[-1:]
        if self.step == ALL:
            return have
        first, last = _range(self.step)
        return range(first, last + 1)

    @property
    def shown(self) -> int | None:
        """Limit of what is shown; None for no limit."""
        return self.limit or (None if self.json_lines else SHOWN)

    def includes(self, record: RolloutRecord) -> bool:
        """Whether the filters let a sequence through."""
        return (
            (self.task is None or record.task == self.task)
            and (self.min_reward is None or record.score >= self.min_reward)
            and (self.max_reward is None or record.score <= self.max_reward)
            and (self.min_tokens is None or record.completion_tokens >= self.min_tokens)
            and (self.max_tokens is None or record.completion_tokens <= self.max_tokens)
        )


def _range(text: str) -> tuple[int, int]:
    """`7` → (7, 7), `10-20` → (10, 20)"""
    first, separator, last = text.partition("-")
    try:
        return int(first), int(last if separator else first)
    except ValueError:
        raise ValueError("expected a step, a range of steps such as 10-20, or all") from None


def _named(steps: list[int]) -> str:
    """`steps 1 to 40`"""
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


class ReportSettings(CommandSettings):
    """Writes one HTML file that shows a run: its curves, and its rollouts with every token. The
    run may still be training. The file needs no network and no server."""

    command: ClassVar[Command] = Command(
        prog="grpo-report",
        env_prefix="GRPO_REPORT_",
        positional=("run",),
        examples=(
            "grpo-report runs/latest --open",
            "grpo-report runs/latest --output report.html",
        ),
    )

    run: Path = Field(description="Directory of the run, or the --save-path of a trainer")
    output: Annotated[Path | None, Shown(default="<run>/report.html")] = Field(
        None, description="File to write"
    )
    open: bool = Field(False, description="Show the file in a browser")

    def start_mistakes(self) -> Iterator[Mistake]:
        if not self.run.is_dir():
            yield Mistake("run", f"no such directory: {self.run}; name the directory of a run")
        elif self.output is not None and self.output.is_dir():
            yield Mistake("output", f"{self.output} is a directory; name a file")
        elif problem := not_writable(self.output.parent if self.output else self.run):
            yield Mistake("output", problem)
