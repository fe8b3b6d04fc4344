"""A whole run: `grpo-demo`, and `grpo-run` with a task, from start to summary."""

from __future__ import annotations

import contextlib
import sys
import time
import webbrowser
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.listening import LOOPBACK
from grpo_core.process import ManagedProcess, ProcessFailed
from grpo_core.redis.url import redis_password, with_password
from grpo_core.security import plain
from grpo_core.settings import resolved_yaml
from grpo_core.settings.machine import MADE_HERE, TINY
from grpo_core.temporary import temporary_directory
from grpo_core.weights.version_log import VersionLog
from grpo_runs.notices import RunNotices
from grpo_runs.process.health import HealthProbe
from grpo_runs.process.ports import free_port
from grpo_runs.process.records import ProcessRecords
from grpo_runs.process.stack import Stack, StopRequest, StopRequested, start_on_screen
from grpo_runs.report.evaluations import EvaluationsFile
from grpo_runs.report.steps import (
    HEADER_EVERY_STEPS,
    MetricsFile,
    StepRecord,
    flat_start_hint,
    header_lines,
    legend_lines,
    step_line,
    trim_records,
)
from grpo_runs.report.summary import (
    INDENT,
    Trained,
    WholeRun,
    counted,
    facts_of,
    groups_text,
    report_run,
    warnings_text,
)
from grpo_runs.run_directory import RunDirectory, create_run_directory
from grpo_runs.screen import Screen
from grpo_runs.services import (
    MODEL_PATH_FILE,
    environment_name,
    make_weights_directory,
    model_job,
    redis_of,
    redis_url,
    services_of,
    weights_socket_path,
)
from grpo_runs.settings.run import RunSettings
from grpo_runs.settings.views import Places
from grpo_runs.watch.followed_file import FollowedFile
from grpo_runs.watch.logs import ServiceLogs
from grpo_runs.watch.news import ServiceNews

FOLLOW_POLL_S = 0.2
REDIS_DEADLINE_S = 5.0
SAVE_GRACE_S = 120.0
"""After a stop signal, for the end of a step and a checkpoint."""
COMPLETE = "run.completed"
"""The event that an environment logs when it ends as it should."""
COMMANDS = ("grpo-run", "grpo-demo")


class NoTrainingStep(GrpoError):
    """All processes are running, but the trainer finished no step within `--step-deadline-s`."""


def run_whole(settings: RunSettings, screen: Screen) -> int:
    """Run it all; returns the exit status: 0, 1 after a failure, 128 + n after signal n."""
    with StopRequest() as stop_request, contextlib.ExitStack() as held:
        try:
            run = (
                create_run_directory(settings.run_dir, settings.seed)
                if settings.resumed is None
                else RunDirectory.of(settings.resumed)
            )
            held.enter_context(run.hold())
        except GrpoError as error:
            return screen.failed(error)
        if settings.resumed is None:
            run.write_config(resolved_yaml(settings.command, settings.resolved()))
        notices = RunNotices(settings, run, screen)
        held.callback(notices.settle)
        processes, news = ProcessRecords(run), ServiceNews(screen, run.logs, run)
        whole = WholeRun(settings, run, screen, EvaluationsFile(run.evaluations))
        try:
            with page_beside(whole), notices.of_the_end(), processes.of_the_end():
                started = time.monotonic()
                trained = _train(whole, stop_request, notices, processes, news)
                seconds = time.monotonic() - started
                facts = facts_of(whole, trained, seconds, processes.peak_bytes)
                report_run(whole, facts, trained, command_typed())
        except StopRequested as stopped:
            screen.failure(f"{stopped}; every process of this run has ended")
            status = stopped.exit_status
        except GrpoError as error:
            status = screen.failed(error)
        else:
            status = 0
        news.repeat()
        if status:
            screen.advice(_after_a_failure(run, news.logs))
        return status


@contextlib.contextmanager
def page_beside(whole: WholeRun) -> Iterator[None]:
    """Serve the live page while the context is open: with --watch, and by default where somebody
    sits at a terminal. A browser shows it if one is at hand.

    Raises:
        PageNotServed: nothing can listen on a port of this machine.
    """
    settings = whole.settings
    wanted = sys.stdout.isatty() if settings.watch is None else settings.watch
    if not wanted:
        yield
        return
    from grpo_runs.watch.serve import PageServer, has_browser, live_runs

    page = PageServer(live_runs([whole.run.path], plain(settings.run_api_token)), LOOPBACK, port=0)
    with page.in_a_thread():
        whole.screen.line(f"watch this run at {page.url}")
        if has_browser():
            webbrowser.open(page.url)
        yield


def command_typed() -> str:
    """The command as the user can type it again."""
    called = Path(sys.argv[0])
    return str(called) if called.name in COMMANDS else "python -m grpo_runs"


def _after_a_failure(run: RunDirectory, logs: ServiceLogs) -> list[str]:
    logs.read_new()
    lines = [f"groups: {groups}"] if (groups := groups_text(logs.groups)) else []
    lines += [f"warnings: {warnings_text(logs.counts)}"] if logs.warnings else []
    lines.append(f"logs of all services: {run.logs}")
    saved, taken = run.newest_checkpoint_step(), len(FollowedFile(run.metrics).new_lines())
    if saved:
        repeated = f" (repeats {counted(taken - saved, 'step')})" if taken > saved else ""
        lines.append(f"to continue this run: {command_typed()} --resume {run.path}{repeated}")
    else:
        lines.append("this run has no checkpoint of a step yet: start it anew")
    return lines


def _train(
    whole: WholeRun,
    stop_request: StopRequest,
    notices: RunNotices,
    processes: ProcessRecords,
    news: ServiceNews,
) -> Trained:
    settings, run, screen = whole.settings, whole.run, whole.screen
    records: list[StepRecord] = []
    if settings.resumed:  # the steps after the newest checkpoint are repeated
        records = trim_records(run.metrics, run.newest_checkpoint_step() or 0)
    done = len(records)
    screen.lines(opening_lines(settings, run, done))
    whole.evaluations.read_new()  # those of the run that is resumed

    def watch(pids: Mapping[str, int]) -> None:
        processes.watch(pids)
        news.watch(pids)

    with (
        temporary_directory() as temporary,
        HealthProbe(plain(settings.run_api_token)) as probe,
        Stack(run.logs, stop_request, watch) as stack,
    ):
        try:
            places = start_services(whole, probe, stack, weights_socket_path(temporary))
            notices.watch(places.run_api_url)
            processes.found_run_api(places.run_api_url)
            if settings.evaluates_every and not done:
                screen.line("evaluating the policy before the first step (--eval-every 0: never)")
            started = time.monotonic()
            with screen.waiting(news.waited_for):
                records += follow_training(whole, stack, done)
            seconds = time.monotonic() - started
            if settings.evaluates_every:
                with screen.activity("evaluating the trained policy"):
                    _wait_for_evaluations(settings, stack)
                whole.show_evaluations()
            with VersionLog(places.redis_url, places.run_id, REDIS_DEADLINE_S) as versions:
                servers = versions.servers_for_report()
            return Trained(records, done, seconds, servers, stack.lost(), news.logs)
        except StopRequested:
            with screen.activity("finishing the step and saving it; Ctrl-C again stops at once"):
                stack.stop_in_time("trainer", SAVE_GRACE_S)
            raise
        finally:
            notices.settle()
            with screen.activity("stopping all services"):
                stack.stop()
            news.look()


def opening_lines(settings: RunSettings, run: RunDirectory, done: int) -> list[str]:
    """Tell what will run. Args: done: steps of a run that is resumed"""
    mode, last = settings.weight_mode, settings.steps
    steps = f"steps {done + 1} to {last}" if done else counted(last, "training step")
    model = "a tiny model" if settings.model == TINY else settings.model
    return [
        f"GRPO on {' and '.join(settings.task)} with {model}: {steps}",
        f"mode {mode.name}: {mode.publication(settings.publish_every_steps)}",
        f"files of this run: {run.path}",
    ]


def start_services(
    whole: WholeRun, probe: HealthProbe, stack: Stack, weights_socket: Path
) -> Places:
    """Start the services, each on a port of its own, and wait until all are ready.

    Most of a start is importing, and services that need each other wait: so they start side by
    side.

    Raises:
        ProcessFailed: one of them did not become ready.
        StopRequested: a stop signal arrived.
    """
    settings, run, redis_port = whole.settings, whole.run, free_port()
    url = with_password(redis_url(redis_port), redis_password(run.redis))
    path_file, jobs = run.path / MODEL_PATH_FILE, []
    if settings.model in MADE_HERE:
        jobs = [model_job(settings.model, path_file, 2 * settings.compute_threads)]
    start_on_screen(stack, [redis_of(run, redis_port), *jobs], whole.screen)
    model = path_file.read_text().strip() if jobs else settings.model
    places = Places.of(settings, model, weights_socket, run, url, free_port)
    make_weights_directory(settings, places)
    start_on_screen(stack, services_of(settings, places, probe), whole.screen)
    return places


def follow_training(whole: WholeRun, stack: Stack, done: int = 0) -> list[StepRecord]:
    """Show every step until the trainer has ended; returns the records of the steps shown.

    Args:
        done: steps that are in the metrics file already
    Raises:
        ProcessFailed: a process failed, the trainer ended before its last step, or an environment
            before the run was complete.
        NoTrainingStep: `step_deadline_s` passed without a step.
        ProtocolViolation: the metrics file breaks its contract.
        StopRequested: a stop signal arrived.
    """
    settings, run, screen = whole.settings, whole.run, whole.screen
    metrics = MetricsFile(run.metrics)
    records: list[StepRecord] = []
    trainer = stack.process("trainer")
    last_step_at = time.monotonic()
    while True:
        stack.warn_of_lost(screen)
        finished = trainer.exit_code == 0  # read before the file, which is then complete
        if whole.show_evaluations():
            last_step_at = time.monotonic()
        for record in metrics.read_new():
            at = record.step - done - 1
            if at < 0 or records[at : at + 1] == [record]:
                continue
            del records[at:]  # ranks that started again repeat the steps after their checkpoint
            if not records:
                screen.lines(legend_lines(record), style="dim")
                if settings.resumed:  # a trainer that refuses its settings leaves the earlier ones
                    run.write_config(resolved_yaml(settings.command, settings.resolved()))
            if len(records) % HEADER_EVERY_STEPS == 0:
                screen.lines(header_lines(record), style="bold")
            screen.line(step_line(record))
            records.append(record)
            last_step_at = time.monotonic()
            if not done and (hint := flat_start_hint(records, settings.lr)):
                screen.line(f"{INDENT}{hint}", style="dim")
            if news := settings.weight_mode.news(record.step, record.sync_s):
                screen.line(f"{INDENT}{news}", style="dim")
        if finished:
            if done + len(records) >= settings.steps:
                return records
            raise ProcessFailed(
                f"the trainer ended with status 0 after {done + len(records)} of {settings.steps} "
                f"steps; see {trainer.log_path}\n{trainer.log_tail()}"
            )
        for environment in environments_of(settings, stack):
            # The code of a task may end its process, with status 0.
            if environment.exit_code == 0 and COMPLETE not in environment.log_text():
                raise ProcessFailed(
                    f"{environment.name} ended with status 0 before the run was complete; see "
                    f"{environment.log_path}\n{environment.log_tail()}"
                )
        if time.monotonic() - last_step_at > settings.step_deadline_s:
            raise NoTrainingStep(
                f"no training step ended within {settings.step_deadline_s:g} s, after "
                f"{done + len(records)} of {settings.steps} steps; see {trainer.log_path} and the "
                f"logs of the other services, or raise --step-deadline-s\n{trainer.log_tail()}"
            )
        stack.sleep(FOLLOW_POLL_S)


def environments_of(settings: RunSettings, stack: Stack) -> list[ManagedProcess]:
    return [stack.process(environment_name(settings, task)) for task in settings.task]


def _wait_for_evaluations(settings: RunSettings, stack: Stack) -> None:
    """Wait until the environments have evaluated the policy of the last step and ended. They may
    take as long as a step; a run whose last evaluation takes longer ends without it."""
    deadline = Deadline(settings.step_deadline_s)
    while any(environment.exit_code is None for environment in environments_of(settings, stack)):
        if deadline.has_passed:
            return
        stack.sleep(FOLLOW_POLL_S)
