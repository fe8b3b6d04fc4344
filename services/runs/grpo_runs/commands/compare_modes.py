"""`grpo-compare`: runs `grpo-demo` once in each mode, and compares the results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from grpo_core.cpu import CPU
from grpo_core.errors import GrpoError, ProtocolViolation
from grpo_core.process import describe_exit
from grpo_core.settings import without_secrets
from grpo_core.tree.weights import ModeName
from grpo_runs.process.stack import MIB, Service, Stack, StopRequest, StopRequested
from grpo_runs.report.plots import draw_comparison
from grpo_runs.report.steps import MetricsFile
from grpo_runs.report.summary import RunFacts, read_record
from grpo_runs.run_directory import (
    ONE_OF_SERVERS,
    ONE_SERVER,
    RUNS,
    RunDirectory,
    default_name,
)
from grpo_runs.screen import EXIT_FAILED, Screen
from grpo_runs.settings.compare import CompareSettings

FAILURE_MARK = "failed ("
"""Start of the line in which `grpo-demo` names its failure."""
LOGS = "logs"
TABLE, CURVES, RECORD = "comparison.md", "comparison.png", "comparison.json"
"""Files of a comparison. Each run has a directory beside them, named after its mode."""
RUN_GRACE_S = 60.0
"""A run needs time to stop its own processes."""
NOT_KNOWN = "-"
LINES_PER_RUN = 10


def compare_modes(settings: CompareSettings, screen: Screen) -> int:
    """Returns the exit status: 0 if no mode failed or dropped a request, otherwise 1; 128 + n after
    signal n."""
    with StopRequest() as stop_request:
        try:
            name = f"compare-{default_name(datetime.now(UTC), settings.seed)}"
            directory = settings.directory or RUNS / name
            (directory / LOGS).mkdir(parents=True)
            modes = ", ".join(settings.modes)
            screen.line(f"{settings.steps} steps in each of {modes}; files in {directory}")
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


def demo_job(settings: CompareSettings, mode: ModeName, run: Path) -> Service:
    """One run, in a directory of its own. It has its own ports and deadlines."""
    gpus = dict(zip(settings.modes, settings.gpu_ids, strict=False))
    words = ["--mode", mode, "--steps", str(settings.steps), "--seed", str(settings.seed)]
    return Service(
        name=mode,
        command=[
            *(sys.executable, "-m", "grpo_runs", *settings.words_in(mode)),
            *(*words, "--run-dir", str(run)),
        ],
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
    result = partial(ModeResult, mode=mode, run=run.path, log=log)
    if status != 0:
        return result(failure=_why(status, log))
    try:
        return result(facts=read_record(RunFacts, run.summary))
    except ProtocolViolation as error:
        return result(failure=str(error))


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
    drawn = {mode: steps for mode, steps in runs.items() if steps}
    draw_comparison(drawn, title, directory / CURVES)


class ModeResult(BaseModel, frozen=True):
    """The result of one run: either `facts` or `failure`."""

    mode: ModeName
    run: Path
    log: Path
    """The output of the run."""
    facts: RunFacts | None = None
    failure: str | None = None

    @property
    def problems(self) -> list[str]:
        """Why the run is not a success, one line each; empty if it is."""
        if self.facts is None:
            return [f"{self.mode} failed: {self.failure}; see {self.log}"]
        if not self.facts.servers:
            return [f"{self.mode}: the server did not report how many requests it dropped"]
        dropped = self.facts.dropped_requests
        return [f"{self.mode}: the server dropped {dropped} requests, not 0"] if dropped else []


class ModeComparison(BaseModel, frozen=True):
    """`comparison.json`."""

    steps: int
    seed: int
    cores: int
    side_by_side: bool
    passed_on: list[str]
    """Options of every run."""
    results: list[ModeResult]

    @property
    def problems(self) -> list[str]:
        return [problem for result in self.results for problem in result.problems]


Measure = Callable[[RunFacts], float | None]


def _trainer(facts: RunFacts, name: str, scale: int = 1) -> float | None:
    """A value of the trainer's `benchmark.json`, divided by `scale`."""
    value: float | None = getattr(facts.benchmark, name) if facts.benchmark else None
    return value if value is None or scale == 1 else value / scale


def _servers(facts: RunFacts, name: str) -> float | None:
    """A number of the servers' last statuses, added up."""
    return sum(getattr(each, name) for each in facts.servers) if facts.servers else None


def _peak_mib(facts: RunFacts, *services: str) -> float | None:
    """Of the processes whose names begin with one of these."""
    found = [peak for name, peak in facts.peak_bytes.items() if name.startswith(services)]
    return sum(found) / MIB if found else None


def _generated_per_s(facts: RunFacts) -> float | None:
    """Tokens per second of training, restarts included."""
    tokens = _servers(facts, "generation_tokens")
    return None if tokens is None else tokens / facts.summary.training_s


ROWS: Mapping[str, tuple[Measure, str]] = {
    "total time with start and stop (s)": (lambda f: f.summary.total_s, ".1f"),
    "training (s)": (lambda f: f.summary.training_s, ".1f"),
    "steps": (lambda f: f.summary.steps, "d"),
    "all steps (s)": (lambda f: f.summary.step_s * f.summary.steps, ".1f"),
    "a step, mean (s)": (lambda f: f.summary.step_s, ".2f"),
    "all weight sync (s)": (lambda f: f.summary.sync_s * f.summary.steps, ".1f"),
    "weight sync per step, mean (s)": (lambda f: f.summary.sync_s, ".2f"),
    "a publication, mean (s)": (lambda f: _trainer(f, "sync_s_mean"), ".2f"),
    "all waits for data (s)": (lambda f: f.summary.fetch_s * f.summary.steps, ".1f"),
    "wait for data per step, mean (s)": (lambda f: f.summary.fetch_s, ".2f"),
    "peak GPU memory, trainer (MiB)": (lambda f: _trainer(f, "peak_cuda_bytes", MIB), ".0f"),
    "mean GPU memory, trainer (MiB)": (lambda f: _trainer(f, "cuda_bytes_mean", MIB), ".0f"),
    "peak resident memory, trainer (MiB)": (lambda f: _trainer(f, "peak_rss_bytes", MIB), ".0f"),
    "mean resident memory, trainer (MiB)": (lambda f: _trainer(f, "rss_bytes_mean", MIB), ".0f"),
    "peak memory, trainer (MiB)": (lambda f: _peak_mib(f, "trainer"), ".0f"),
    "peak memory, server (MiB)": (lambda f: _peak_mib(f, ONE_SERVER, ONE_OF_SERVERS), ".0f"),
    "checkpoint on disk (MiB)": (lambda f: _trainer(f, "checkpoint_bytes", MIB), ".1f"),
    "trained model on disk (MiB)": (lambda f: _trainer(f, "model_bytes", MIB), ".1f"),
    "trained adapter on disk (MiB)": (lambda f: _trainer(f, "adapter_bytes", MIB), ".1f"),
    "generated tokens per second": (_generated_per_s, ".0f"),
    "publications": (lambda f: _trainer(f, "publishes"), "d"),
    "engine restarts": (lambda f: _servers(f, "restarts"), "d"),
    "engine crashes": (lambda f: _servers(f, "crashes"), "d"),
    "dropped requests": (lambda f: _servers(f, "dropped_requests"), "d"),
    "reward, first tenth of the steps": (lambda f: f.summary.first_reward, ".3f"),
    "reward, last tenth of the steps": (lambda f: f.summary.last_reward, ".3f"),
}


def table_lines(results: Sequence[ModeResult]) -> list[str]:
    """A table in GitHub's Markdown: a line per measure, a column per mode."""
    head = ["", *(f"`{result.mode}`" for result in results)]
    rows = [["result", *("ok" if result.facts else "failed" for result in results)]]
    for title, (measure, form) in ROWS.items():
        values = [measure(result.facts) if result.facts else None for result in results]
        rows.append([title, *(NOT_KNOWN if v is None else format(v, form) for v in values)])
    return [_line(head), _line(["---", *("---:" for _ in results)]), *map(_line, rows)]


def document(comparison: ModeComparison, plot: str) -> str:
    """`comparison.md`."""
    how = "all at once" if comparison.side_by_side else "one after another"
    options = " ".join(comparison.passed_on) or "none"
    return "\n".join(
        [
            "# Modes compared",
            "",
            f"{comparison.steps} steps each, seed {comparison.seed}, {how}, on "
            f"{comparison.cores} cores; more options: {options}.",
            "",
            *table_lines(comparison.results),
            "",
            *(f"- {problem}" for problem in comparison.problems),
            *([""] if comparison.problems else []),
            "The trainer measures all times but the first two, and its own GPU and resident memory "
            "after each step. Peak memory is the proportional set size "
            "of a process and its children, sampled every five seconds: pages that server and "
            "trainer share count once. Generated tokens are counted by the server during training. "
            "The LoRA modes have a higher learning rate.",
            "",
            f"![reward by step and by time]({plot})",
            "",
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def show_new_steps(metrics: Mapping[ModeName, MetricsFile], screen: Screen) -> None:
    """Show a line after the first step of a run, and then one per tenth of the run.

    Raises:
        ProtocolViolation: a metrics file breaks its contract.
    """
    for mode, file in metrics.items():
        for record in file.read_new():
            if record.step == 1 or record.step % max(1, record.steps // LINES_PER_RUN) == 0:
                screen.line(
                    f"{mode:<12} step {record.step:>4}/{record.steps}  "
                    f"reward {record.reward_mean:.3f}  {record.time_s:7.1f} s"
                )
