"""What a run leaves at its end: the plot, the summary and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_core.weights.servers import ServerStatus
from grpo_runs.report.evaluations import EvaluationsFile, few_items_warning, lift_text
from grpo_runs.report.steps import StepRecord
from grpo_runs.report.summary import (
    BenchmarkFacts,
    RunFacts,
    closing_lines,
    read_record,
    summarise,
    summary_lines,
)
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import Screen
from grpo_runs.settings.run import RunSettings
from grpo_runs.watch.logs import ServiceLogs


@dataclass(frozen=True)
class Trained:
    """Args: resumed_after: as of `Summary`; servers: those at the end; ended: signal or status of
    services that ended early; logs: read since the start"""

    records: list[StepRecord]
    resumed_after: int
    seconds: float
    servers: Sequence[ServerStatus]
    ended: Mapping[str, str]
    logs: ServiceLogs


def facts_of(
    settings: RunSettings,
    run: RunDirectory,
    trained: Trained,
    seconds: float,
    peak: dict[str, int],
) -> RunFacts:
    benchmark = run.checkpoints / "benchmark.json"
    return RunFacts(
        mode=settings.mode,
        seed=settings.seed,
        summary=summarise(trained.records, seconds, trained.seconds, trained.resumed_after),
        benchmark=read_record(BenchmarkFacts, benchmark) if benchmark.exists() else None,
        servers=tuple(one for one in trained.servers if one.name not in trained.ended),
        ended_servers=trained.ended,
        peak_bytes=peak,
        groups=trained.logs.groups,
        warnings=trained.logs.counts,
    )


def report_run(
    settings: RunSettings,
    run: RunDirectory,
    screen: Screen,
    facts: RunFacts,
    trained: Trained,
    evaluations: EvaluationsFile,
    command: str,
) -> None:
    """Write the plot, the summary and the page, and show the summary.

    Args: command: started the run, as the user types it
    """
    with screen.activity("drawing the reward plot"):
        from grpo_runs.report.plots import draw_reward_curve

        title = f"GRPO on {' and '.join(settings.task)}, seed {settings.seed}"
        draw_reward_curve(trained.records, title, run.reward_plot)
    run.summary.write_text(facts.model_dump_json(indent=2) + "\n")
    if settings.report:
        with screen.activity("writing the page with the rollouts"):
            from grpo_runs.report.page import write_report

            write_report(run, logs=trained.logs, logs_after=trained.resumed_after)
    screen.line("")
    lifts = [lift_text(*lift) for lift in evaluations.lifts()]
    screen.lines(summary_lines(facts, lifts), "bold")
    more = f"{command} --resume {run.path} --steps {2 * settings.sizes.steps}"
    screen.lines(closing_lines(run, settings.weight_mode, more, settings.report))
    for task, _, items in evaluations.lifts():
        if warning := few_items_warning(task, items):
            screen.warning(warning)
