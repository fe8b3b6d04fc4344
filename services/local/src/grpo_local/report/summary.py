"""The figures of a finished run: for the user, and as `summary.json` for other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_core.errors import ProtocolViolation
from grpo_core.weights.supervisor_protocol import SupervisorStatus
from grpo_local.modes import Mode, ModeName
from grpo_local.report.metrics_file import StepRecord
from grpo_local.report.step_table import seconds
from grpo_local.run_directory import RunDirectory

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Summary:
    """Averages over steps; `tenth_steps` is how many steps the first and the last tenth have."""

    steps: int
    tenth_steps: int
    first_reward: float
    last_reward: float
    total_s: float
    training_s: float
    generation_s: float | None
    """None where no environment says how long it took."""
    fetch_s: float
    compute_s: float
    sync_s: float
    step_s: float


def summarise(records: Sequence[StepRecord], total_s: float, training_s: float) -> Summary:
    """Needs one record at least. A tenth is rounded down, to one step at least."""
    tenth = max(1, len(records) // 10)

    def mean(value: Callable[[StepRecord], float]) -> float:
        return fmean(value(record) for record in records)

    generations = [r.generation_s for r in records if r.generation_s is not None]
    return Summary(
        steps=len(records),
        tenth_steps=tenth,
        first_reward=fmean(record.reward_mean for record in records[:tenth]),
        last_reward=fmean(record.reward_mean for record in records[-tenth:]),
        total_s=total_s,
        training_s=training_s,
        generation_s=fmean(generations) if generations else None,
        fetch_s=mean(lambda record: record.fetch_s),
        compute_s=mean(lambda record: record.compute_s),
        sync_s=mean(lambda record: record.sync_s),
        step_s=mean(lambda record: record.step_s),
    )


class Benchmark(BaseModel):
    """What the runner takes from the trainer's `benchmark.json`; other keys are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    publishes: int
    peak_cuda_bytes: int | None = None


class RunFacts(BaseModel):
    """None: nobody said."""

    model_config = ConfigDict(frozen=True)

    mode: ModeName
    seed: int
    summary: Summary
    benchmark: Benchmark | None
    server: SupervisorStatus | None
    """The last that the supervisor said while the trainer was there."""
    peak_bytes: dict[str, int]
    """Memory of each service's process tree."""

    @property
    def publication(self) -> str:
        """How often weights were published, and what that cost, as one line."""
        published = f"published {self.benchmark.publishes} times; " if self.benchmark else ""
        if self.server is None:
            return f"{published}the server did not say how often it restarted"
        return (
            f"{published}{counted(self.server.restarts, 'engine restart')}, "
            f"{counted(self.server.dropped_requests, 'dropped request')}"
        )


def counted(number: int, what: str) -> str:
    """`1 restart`, `2 restarts`."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def read_record(kind: type[Model], path: Path) -> Model:
    """Raises `ProtocolViolation` where the file is missing or holds something else."""
    try:
        return kind.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise ProtocolViolation(f"{path} holds no {kind.__name__}: {error}") from None


def summary_lines(summary: Summary, run: RunDirectory, mode: Mode, publication: str) -> list[str]:
    """`publication`: how often weights were published, and what that cost."""
    steps = "step" if summary.tenth_steps == 1 else f"{summary.tenth_steps} steps"
    facts = {
        "reward": f"{summary.first_reward:.3f} in the first {steps}, "
        f"{summary.last_reward:.3f} in the last {steps} (mean)",
        "steps": f"{summary.steps} in {summary.training_s:.1f} s; "
        f"{summary.total_s:.1f} s with starting the services",
        "per step": f"{summary.step_s:.2f} s: generate {seconds(summary.generation_s)}, "
        f"wait {summary.fetch_s:.2f}, train {summary.compute_s:.2f}, "
        f"publish {summary.sync_s:.2f} (mean)",
        "weights": publication,
        "curve": str(run.reward_plot),
        "metrics": str(run.metrics),
        "model": str(run.checkpoints / mode.final_directory),
        "logs": str(run.logs),
    }
    return [f"{name + ':':<10}{fact}" for name, fact in facts.items()]
