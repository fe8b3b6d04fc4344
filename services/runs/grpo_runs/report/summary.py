"""What a run leaves at its end: its summary, in a file and for the user, its plot and its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from pydantic import BaseModel

from grpo_core.errors import ProtocolViolation, parsing
from grpo_core.tree.weights import ModeName
from grpo_core.weights.servers import ServerStatus
from grpo_runs.report.evaluations import (
    EvaluationsFile,
    evaluation_line,
    few_items_warning,
    lift_text,
)
from grpo_runs.report.lost import lost_lines
from grpo_runs.report.steps import StepRecord
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import Screen
from grpo_runs.settings.run import RunSettings
from grpo_runs.watch.logs import DROPPED, LOST, SENT, ServiceLogs

Model = TypeVar("Model", bound=BaseModel)
INDENT = 9 * " "


@dataclass(frozen=True)
class Summary:
    """Averages over the steps of a run. `tenth_steps`: number of steps in a tenth of the run.

    resumed_after: the step after which this command resumed the run. Steps and rewards are those of
        the whole run, everything else counts from there.
    """

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
    resumed_after: int = 0
    late_publications: int = 0
    """For which a step did not wait until all servers served them."""
    servers_left: int = 0
    """How often a server went away."""
    repeated_announcements: int = 0
    """Of versions that Redis had lost."""
    unanswered_checks: int = 0
    """Requests of the trainer that a server did not answer while others served."""
    by_files: int = 0
    """Versions that were written as files, with --weight-transport collective."""


def ends_of(rewards: Sequence[float]) -> tuple[int, float, float]:
    """Number of steps in a tenth of the run, rounded down but at least one; and the means of the
    first and of the last tenth."""
    tenth = max(1, len(rewards) // 10)
    return tenth, fmean(rewards[:tenth]), fmean(rewards[-tenth:])


def summarise(
    records: Sequence[StepRecord], total_s: float, training_s: float, resumed_after: int = 0
) -> Summary:
    """Needs at least one record of a step after `resumed_after`."""
    tenth, first, last = ends_of([record.reward_mean for record in records])
    now = records[resumed_after:]
    generations = [r.generation_s for r in now if r.generation_s is not None]
    return Summary(
        steps=len(records),
        tenth_steps=tenth,
        first_reward=first,
        last_reward=last,
        total_s=total_s,
        training_s=training_s,
        generation_s=fmean(generations) if generations else None,
        fetch_s=fmean(record.fetch_s for record in now),
        compute_s=fmean(record.compute_s for record in now),
        sync_s=fmean(record.sync_s for record in now),
        step_s=fmean(record.step_s for record in now),
        resumed_after=resumed_after,
        late_publications=sum(record.is_late for record in now),
        servers_left=sum(record.servers_left for record in now),
        repeated_announcements=sum(record.repeated_announcements for record in now),
        unanswered_checks=sum(record.unanswered_checks for record in now),
        by_files=sum(record.by_files for record in now),
    )


class BenchmarkFacts(BaseModel, frozen=True):
    """The part of the trainer's `benchmark.json` that a summary needs."""

    publishes: int
    sync_s_mean: float | None
    rss_bytes_mean: float
    peak_rss_bytes: int
    cuda_bytes_mean: float | None
    peak_cuda_bytes: int | None
    checkpoint_bytes: int | None
    model_bytes: int | None
    adapter_bytes: int | None


class RunFacts(BaseModel, frozen=True):
    """`summary.json`. None: not reported."""

    mode: ModeName
    seed: int
    summary: Summary
    benchmark: BenchmarkFacts | None
    servers: tuple[ServerStatus, ...] = ()
    """The last status of each server that was there at the end of the trainer."""
    ended_servers: dict[str, str] = {}
    """How the others ended, by name."""
    peak_bytes: dict[str, int]
    """Highest memory of each service, its child processes included."""
    groups: dict[str, int] = {}
    """Groups that environments sent, dropped for equal scores and lost, since their start."""
    warnings: dict[str, int] = {}
    """How often each service warned of what, since its start."""

    @property
    def publication(self) -> str:
        """How often weights were published, and what that cost, in one line."""
        publishes = self.benchmark.publishes if self.benchmark else None
        published = "" if publishes is None else f"{counted(publishes, 'publication')}, "
        if not self.servers:
            return f"{published}number of engine restarts not reported"
        crashes = sum(server.crashes for server in self.servers)
        # A restart counts later than its crash.
        restarts = sum(max(server.restarts, server.crashes) for server in self.servers)
        return (
            f"{published}{counted(restarts, 'engine restart')}, "
            + (f"{crashes} of them not planned (the engine crashed), " if crashes else "")
            + counted(self.dropped_requests, "dropped request")
        )

    @property
    def dropped_requests(self) -> int:
        return sum(server.dropped_requests for server in self.servers)

    @property
    def serving(self) -> str | None:
        """The servers of a run with several, in one line: how many there are at the end, what they
        serve, and what they had to repeat."""
        number = len(self.servers) + len(self.ended_servers)
        if number < 2:
            return None
        versions = Counter(str(list(server.version)) for server in self.servers)
        held = ", ".join(
            f"{version} on {many}" if len(versions) > 1 else version
            for version, many in sorted(versions.items())
        )
        summary = self.summary
        repeated = {
            "late publication": summary.late_publications,
            "repeated announcement": summary.repeated_announcements,
            "unanswered check": summary.unanswered_checks,
            "publication by files": summary.by_files,
            "wrong chunk": sum(server.wrong_chunks for server in self.servers),
            "failed source": sum(server.failed_sources for server in self.servers),
            "torn load": sum(server.torn for server in self.servers),
        }
        left = [f"{counted(summary.servers_left, 'server')} left"] if summary.servers_left else []
        ended = [f"{name} ended with {how}" for name, how in self.ended_servers.items()]
        return "; ".join(
            [
                f"{len(self.servers)} of {number}, policy version {held or 'not reported'}",
                *(counted(number, name) for name, number in repeated.items() if number),
                *left,
                *ended,
            ]
        )


def counted(number: int, what: str) -> str:
    """`1 restart`, `2 restarts`."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def groups_text(groups: Mapping[str, int]) -> str:
    """Empty if all were submitted."""
    sent, dropped, lost = groups.get(SENT, 0), groups.get(DROPPED, 0), groups.get(LOST, 0)
    if not dropped + lost:
        return ""
    share = dropped / (sent + dropped + lost)
    told = f"{sent} submitted; {dropped} dropped, all scores equal ({100 * share:.0f} %)"
    return f"{told}; {lost} lost" if lost else told


def warnings_text(warnings: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({counted(count, 'time')})" for name, count in warnings.items())


def read_record(kind: type[Model], path: Path) -> Model:
    """Raises `ProtocolViolation` if the file is missing or has other content."""
    try:
        with parsing(f"{path} has missing or invalid fields"):
            return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ProtocolViolation(f"cannot read {path}: {error.strerror}") from None


def summary_lines(facts: RunFacts, lifts: Sequence[str] = ()) -> list[str]:
    """Args: lifts: of each task on held-out items"""
    summary, after = facts.summary, facts.summary.resumed_after
    steps = "step" if summary.tenth_steps == 1 else f"{summary.tenth_steps} steps"
    return _table(
        {
            "reward": f"{summary.first_reward:.3f} in the first {steps}, "
            f"{summary.last_reward:.3f} in the last {steps} (mean)",
            "held out": "; ".join(lifts),
            "resumed": f"after step {after}; what follows counts from there" if after else None,
            "time": f"{summary.training_s:.1f} s of training, "
            f"{summary.total_s:.1f} s with start and stop",
            "per step": f"{summary.step_s:.2f} s: wait {summary.fetch_s:.2f}, "
            f"train {summary.compute_s:.2f}, publish {summary.sync_s:.2f} (mean)",
            "weights": facts.publication,
            "servers": facts.serving,
            "groups": groups_text(facts.groups),
            "warnings": warnings_text(facts.warnings),
        }
    )


def _table(facts: Mapping[str, str | None]) -> list[str]:
    """A line for each fact that there is."""
    return [f"{name + ':':<10}{fact}" for name, fact in facts.items() if fact]


@dataclass(frozen=True)
class WholeRun:
    """A run whose services are all started here, with its directory and its screen."""

    settings: RunSettings
    run: RunDirectory
    screen: Screen
    evaluations: EvaluationsFile

    def show_evaluations(self) -> bool:
        """Show evaluations that are new; returns whether there were any."""
        new = self.evaluations.read_new()
        self.screen.lines([INDENT + evaluation_line(summary) for summary in new], "bold")
        return bool(new)


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


def facts_of(whole: WholeRun, trained: Trained, seconds: float, peak: dict[str, int]) -> RunFacts:
    benchmark = whole.run.checkpoints / "benchmark.json"
    return RunFacts(
        mode=whole.settings.mode,
        seed=whole.settings.seed,
        summary=summarise(trained.records, seconds, trained.seconds, trained.resumed_after),
        benchmark=read_record(BenchmarkFacts, benchmark) if benchmark.exists() else None,
        servers=tuple(one for one in trained.servers if one.name not in trained.ended),
        ended_servers=trained.ended,
        peak_bytes=peak,
        groups=trained.logs.groups,
        warnings=trained.logs.counts,
    )


def report_run(whole: WholeRun, facts: RunFacts, trained: Trained, command: str) -> None:
    """Write the plot, the summary and the page, and show the summary.

    Args: command: started the run, as the user types it
    """
    settings, run, screen = whole.settings, whole.run, whole.screen
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
    lifts = [*whole.evaluations.lifts()]
    lines = summary_lines(facts, [lift_text(*lift) for lift in lifts])
    screen.lines([*lines, *lost_lines(run)], "bold")
    files = {
        "rollouts": str(run.report) if settings.report else None,
        "plot": str(run.reward_plot),
        "model": str(run.checkpoints / settings.weight_mode.final_directory),
        "metrics": str(run.metrics),
        "logs": str(run.logs),
        "disk": run.disk_use(),
        "go on": f"{command} --resume {run.path} --steps {2 * settings.steps}",
    }
    screen.lines(_table(files))
    for task, _, items, lost in lifts:
        if warning := few_items_warning(task, items, lost):
            screen.warning(warning)
