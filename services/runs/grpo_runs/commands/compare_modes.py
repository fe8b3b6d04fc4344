"""`grpo-compare`: runs `grpo-demo` once in each mode, and compares the results."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from grpo_core.cpu import CPU
from grpo_core.errors import GrpoError, ProtocolViolation
from grpo_core.process import describe_exit
from grpo_core.settings import without_secrets
from grpo_core.tree.weights import ModeName
from grpo_runs.process.stack import Service, Stack, StopRequest, StopRequested
from grpo_runs.report.plots import draw_comparison
from grpo_runs.report.steps import MetricsFile
from grpo_runs.report.summary import (
    ModeComparison,
    ModeResult,
    RunFacts,
    document,
    read_record,
    show_new_steps,
    table_lines,
)
from grpo_runs.run_directory import (
    RUNS,
    RunDirectory,
    RunDirectoryUnusable,
    default_name,
    unusable,
)
from grpo_runs.screen import EXIT_FAILED, Screen
from grpo_runs.settings import CompareSettings

FAILURE_MARK = "failed ("
"""Start of the line in which `grpo-demo` names its failure."""
LOGS = "logs"
TABLE, CURVES, RECORD = "comparison.md", "comparison.png", "comparison.json"
"""Files of a comparison. Each run has a directory beside them, named after its mode."""
RUN_GRACE_S = 60.0
"""A run needs time to stop its own processes."""


def compare_modes(settings: CompareSettings, screen: Screen) -> int:
    """Returns the exit status: 0 if no mode failed or dropped a request, otherwise 1; 128 + n after
    signal n."""
    with StopRequest() as stop_request:
        try:
            directory = create_directory(settings)
            screen.line(
                f"{settings.steps} steps in each of {', '.join(settings.modes)}; "
                f"files in {directory}"
            )
            results = _run_all(settings, directory, screen, stop_request)
            comparison = ModeComparison(
                steps=settings.steps,
                seed=settings.seed,
                cores=CPU.cores,
                side_by_side=settings.side_by_side,
                passed_on=without_secrets(settings.passed_on)[0],
                results=results,
            )
            write_comparison(comparison, directory)
        except StopRequested as stopped:
            screen.failure(f"{stopped}; every process of this comparison has ended")
            return stopped.exit_status
        except GrpoError as error:
            return screen.failed(error)
    screen.lines(["", *table_lines(results), "", f"table: {directory / TABLE}"])
    screen.line(f"curves: {directory / CURVES}")
    for problem in comparison.problems:
        screen.failure(problem)
    return EXIT_FAILED if comparison.problems else 0


def create_directory(settings: CompareSettings) -> Path:
    """Raises `RunDirectoryUnusable` if it is not empty."""
    name = f"compare-{default_name(datetime.now(UTC), settings.seed)}"
    directory = settings.directory or RUNS / name
    if problem := unusable(directory, "--directory"):
        raise RunDirectoryUnusable(problem)
    (directory / LOGS).mkdir(parents=True)
    return directory


def demo_job(settings: CompareSettings, mode: ModeName, run: Path) -> Service:
    """One run, in a directory of its own. It has its own ports and deadlines."""
    gpus = dict(zip(settings.modes, settings.gpu_ids, strict=False))
    words = ["--mode", mode, "--steps", str(settings.steps), "--seed", str(settings.seed)]
    return Service(
        name=mode,
        command=[
            *(sys.executable, "-m", "grpo_runs", *settings.passed_on),
            *(*words, "--run-dir", str(run)),
        ],
        healthy=lambda: True,
        deadline_s=0.0,
        environment={"CUDA_VISIBLE_DEVICES": gpus[mode]} if mode in gpus else {},
        may_finish=True,
    )


def _run_all(
    settings: CompareSettings,
    directory: Path,
    screen: Screen,
    stop_request: StopRequest,
) -> list[ModeResult]:
    rounds = [settings.modes] if settings.side_by_side else [[mode] for mode in settings.modes]
    results: list[ModeResult] = []
    for modes in rounds:
        jobs = [demo_job(settings, m, directory / m) for m in modes]
        metrics = {mode: MetricsFile(RunDirectory(directory / mode).metrics) for mode in modes}
        with (
            Stack(directory / LOGS, stop_request, grace_s=RUN_GRACE_S) as stack,
            screen.activity(f"running {', '.join(modes)}"),
        ):
            statuses = stack.join(jobs, partial(show_new_steps, metrics, screen))
        results += [result_of(mode, statuses[mode], directory) for mode in modes]
    return results


def result_of(mode: ModeName, status: int, directory: Path) -> ModeResult:
    """The result of a run that ended with this status."""
    run, log = RunDirectory(directory / mode), directory / LOGS / f"{mode}.log"
    facts, failure = None, None
    if status != 0:
        failure = _why(status, log)
    else:
        try:
            facts = read_record(RunFacts, run.summary)
        except ProtocolViolation as error:
            failure = str(error)
    return ModeResult(mode=mode, run=run.path, log=log, facts=facts, failure=failure)


def _why(status: int, log: Path) -> str:
    """The failure as the run names it, or its exit status."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    said = next((line for line in lines if line.startswith(FAILURE_MARK)), None)
    return said or f"its run ended with {describe_exit(status)}"


def write_comparison(comparison: ModeComparison, directory: Path) -> None:
    """Write the table, the plot and the record. The curve of a failed run ends where it failed.

    Raises:
        ProtocolViolation: a metrics file breaks its contract.
    """
    (directory / RECORD).write_text(comparison.model_dump_json(indent=2) + "\n")
    (directory / TABLE).write_text(document(comparison, CURVES))
    runs = {
        result.mode: MetricsFile(RunDirectory(result.run).metrics).read_new()
        for result in comparison.results
    }
    title = f"GRPO in each mode, seed {comparison.seed}"
    draw_comparison(
        {mode: steps for mode, steps in runs.items() if steps}, title, directory / CURVES
    )
