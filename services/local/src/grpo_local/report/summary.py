"""What a finished run has to say for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo_local.modes import Mode
from grpo_local.report.metrics_file import StepRecord
from grpo_local.report.table import seconds
from grpo_local.run_directory import RunDirectory


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
