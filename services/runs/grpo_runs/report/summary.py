"""Sums up a finished run, for the user and in `summary.json` for other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_core.errors import ProtocolViolation
from grpo_core.tree.weights import ModeName
from grpo_core.weights.supervisor import SupervisorStatus
from grpo_runs.modes import Mode
from grpo_runs.report.metrics_file import StepRecord
from grpo_runs.run_directory import RunDirectory

Model = TypeVar("Model", bound=BaseModel)

CRASHES_WITHOUT_WARNING = 2


@dataclass(frozen=True)
class Summary:
    """Averages over the steps of a run. `tenth_steps`: number of steps in a tenth of the run."""

    steps: int
    tenth_steps: int
    first_reward: float
    last_reward: float
    total_s: float
    training_s: float
    generation_s: float | None
    """None if no environment reported it."""
    fetch_s: float
    compute_s: float
    sync_s: float
    step_s: float


def tenth_of(steps: int) -> int:
    """Rounded down, but at least one step."""
    return max(1, steps // 10)


def summarise(records: Sequence[StepRecord], total_s: float, training_s: float) -> Summary:
    """Needs at least one record."""
    tenth = tenth_of(len(records))
    generations = [r.generation_s for r in records if r.generation_s is not None]
    return Summary(
        steps=len(records),
        tenth_steps=tenth,
        first_reward=fmean(record.reward_mean for record in records[:tenth]),
        last_reward=fmean(record.reward_mean for record in records[-tenth:]),
        total_s=total_s,
        training_s=training_s,
        generation_s=fmean(generations) if generations else None,
        fetch_s=fmean(record.fetch_s for record in records),
        compute_s=fmean(record.compute_s for record in records),
        sync_s=fmean(record.sync_s for record in records),
        step_s=fmean(record.step_s for record in records),
    )


class BenchmarkFacts(BaseModel):
    """The part of the trainer's `benchmark.json` that a summary needs."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    publishes: int
    sync_s_mean: float | None
    rss_bytes_mean: float
    peak_rss_bytes: int
    cuda_bytes_mean: float | None
    peak_cuda_bytes: int | None
    checkpoint_bytes: int | None
    model_bytes: int | None
    adapter_bytes: int | None


class RunFacts(BaseModel):
    """`summary.json`. None: not reported."""

    model_config = ConfigDict(frozen=True)

    mode: ModeName
    seed: int
    summary: Summary
    benchmark: BenchmarkFacts | None
    server: SupervisorStatus | None
    """The supervisor's last status before the end of the trainer."""
    peak_bytes: dict[str, int]
    """Highest memory of each service, its child processes included."""

    @property
    def crashes(self) -> int:
        """How often the engine crashed; 0 if the server did not report it."""
        return self.server.crashes if self.server else 0

    @property
    def publication(self) -> str:
        """How often weights were published, and what that cost, in one line."""
        publishes = self.benchmark.publishes if self.benchmark else None
        published = "" if publishes is None else f"{counted(publishes, 'publication')}, "
        if self.server is None:
            return f"{published}number of engine restarts not reported"
        restarts = max(self.server.restarts, self.crashes)  # a restart counts later than its crash
        return (
            f"{published}{counted(restarts, 'engine restart')}, "
            + (f"{self.crashes} of them not planned (the engine crashed), " if self.crashes else "")
            + counted(self.server.dropped_requests, "dropped request")
        )

    def crash_warning(self, log: Path) -> str | None:
        """The line to show if the engine crashed often. `log`: of the server."""
        if self.crashes <= CRASHES_WITHOUT_WARNING:
            return None
        return (
            f"the engine crashed {counted(self.crashes, 'time')}; "
            f"read the lines before engine.crashed in {log}"
        )


def counted(number: int, what: str) -> str:
    """`1 restart`, `2 restarts`."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def read_record(kind: type[Model], path: Path) -> Model:
    """Raises `ProtocolViolation` if the file is missing or has other content."""
    try:
        return kind.model_validate_json(path.read_text())
    except OSError as error:
        raise ProtocolViolation(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        keys = ", ".join(
            ".".join(map(str, p["loc"])) or "all (not a JSON object)" for p in error.errors()
        )
        raise ProtocolViolation(f"{path} has missing or invalid fields: {keys}") from None


def summary_lines(summary: Summary, publication: str, lifts: Sequence[str] = ()) -> list[str]:
    """
    Args:
        publication: how often weights were published, and what that cost
        lifts: of each task on held-out items
    """
    steps = "step" if summary.tenth_steps == 1 else f"{summary.tenth_steps} steps"
    return _table(
        {
            "reward": f"{summary.first_reward:.3f} in the first {steps}, "
            f"{summary.last_reward:.3f} in the last {steps} (mean)",
            **({"held out": "; ".join(lifts)} if lifts else {}),
            "time": f"{summary.training_s:.1f} s of training, "
            f"{summary.total_s:.1f} s with start and stop",
            "per step": f"{summary.step_s:.2f} s: wait {summary.fetch_s:.2f}, "
            f"train {summary.compute_s:.2f}, publish {summary.sync_s:.2f} (mean)",
            "weights": publication,
        }
    )


def closing_lines(run: RunDirectory, mode: Mode, more: str, has_report: bool) -> list[str]:
    """The files of a finished run. `more`: the command that continues it."""
    return _table(
        {
            **({"rollouts": str(run.report)} if has_report else {}),
            "plot": str(run.reward_plot),
            "model": str(run.checkpoints / mode.final_directory),
            "metrics": str(run.metrics),
            "logs": str(run.logs),
            "go on": more,
        }
    )


def _table(facts: Mapping[str, str]) -> list[str]:
    return [f"{name + ':':<10}{fact}" for name, fact in facts.items()]
