"""Compares the runs of several modes: progress while they run, then a record and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from grpo_core.tree.weights import ModeName
from grpo_runs.process.stack import MIB
from grpo_runs.report.metrics_file import MetricsFile
from grpo_runs.report.summary import BenchmarkFacts, RunFacts
from grpo_runs.screen import Screen

NOT_KNOWN = "-"
LINES_PER_RUN = 10


class ModeResult(BaseModel):
    """The result of one run: either `facts` or `failure`."""

    model_config = ConfigDict(frozen=True)

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
        if self.facts.server is None:
            return [f"{self.mode}: the server did not report how many requests it dropped"]
        dropped = self.facts.server.dropped_requests
        return (
            [f"{self.mode}: the server dropped {dropped} requests; expected 0"] if dropped else []
        )


class ModeComparison(BaseModel):
    """`comparison.json`."""

    model_config = ConfigDict(frozen=True)

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


@dataclass(frozen=True)
class Row:
    title: str
    value: Callable[[RunFacts], float | None]
    form: str


def _mib_of(value: Callable[[BenchmarkFacts], float | None]) -> Callable[[RunFacts], float | None]:
    """MiB from bytes in the trainer's `benchmark.json`."""

    def in_mib(facts: RunFacts) -> float | None:
        held = value(facts.benchmark) if facts.benchmark else None
        return None if held is None else held / MIB

    return in_mib


ROWS = (
    Row("total time with start and stop (s)", lambda f: f.summary.total_s, ".1f"),
    Row("training (s)", lambda f: f.summary.training_s, ".1f"),
    Row("steps", lambda f: f.summary.steps, "d"),
    Row("all steps (s)", lambda f: f.summary.step_s * f.summary.steps, ".1f"),
    Row("a step, mean (s)", lambda f: f.summary.step_s, ".2f"),
    Row("all weight sync (s)", lambda f: f.summary.sync_s * f.summary.steps, ".1f"),
    Row("weight sync per step, mean (s)", lambda f: f.summary.sync_s, ".2f"),
    Row(
        "a publication, mean (s)", lambda f: f.benchmark.sync_s_mean if f.benchmark else None, ".2f"
    ),
    Row("all waits for data (s)", lambda f: f.summary.fetch_s * f.summary.steps, ".1f"),
    Row("wait for data per step, mean (s)", lambda f: f.summary.fetch_s, ".2f"),
    Row("peak GPU memory, trainer (MiB)", _mib_of(lambda b: b.peak_cuda_bytes), ".0f"),
    Row("mean GPU memory, trainer (MiB)", _mib_of(lambda b: b.cuda_bytes_mean), ".0f"),
    Row("peak resident memory, trainer (MiB)", _mib_of(lambda b: b.peak_rss_bytes), ".0f"),
    Row("mean resident memory, trainer (MiB)", _mib_of(lambda b: b.rss_bytes_mean), ".0f"),
    Row("peak memory, trainer (MiB)", lambda f: _mib(f, "trainer"), ".0f"),
    Row("peak memory, server (MiB)", lambda f: _mib(f, "vllm-server"), ".0f"),
    Row("checkpoint on disk (MiB)", _mib_of(lambda b: b.checkpoint_bytes), ".1f"),
    Row("trained model on disk (MiB)", _mib_of(lambda b: b.model_bytes), ".1f"),
    Row("trained adapter on disk (MiB)", _mib_of(lambda b: b.adapter_bytes), ".1f"),
    Row("generated tokens per second", lambda f: _generated_per_s(f), ".0f"),
    Row("publications", lambda f: f.benchmark.publishes if f.benchmark else None, "d"),
    Row("engine restarts", lambda f: f.server.restarts if f.server else None, "d"),
    Row("engine crashes", lambda f: f.server.crashes if f.server else None, "d"),
    Row("dropped requests", lambda f: f.server.dropped_requests if f.server else None, "d"),
    Row("reward, first tenth of the steps", lambda f: f.summary.first_reward, ".3f"),
    Row("reward, last tenth of the steps", lambda f: f.summary.last_reward, ".3f"),
)


def table_lines(results: Sequence[ModeResult]) -> list[str]:
    """A table in GitHub's Markdown: a line per measure, a column per mode."""
    head = ["", *(f"`{result.mode}`" for result in results)]
    rows = [["result", *("ok" if result.facts else "failed" for result in results)]]
    rows += [[row.title, *(_cell(row, result.facts) for result in results)] for row in ROWS]
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


def _mib(facts: RunFacts, service: str) -> float | None:
    peak = facts.peak_bytes.get(service)
    return None if peak is None else peak / MIB


def _generated_per_s(facts: RunFacts) -> float | None:
    """Tokens per second of training, restarts included."""
    return facts.server.generation_tokens / facts.summary.training_s if facts.server else None


def _cell(row: Row, facts: RunFacts | None) -> str:
    value = None if facts is None else row.value(facts)
    return NOT_KNOWN if value is None else format(value, row.form)


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
