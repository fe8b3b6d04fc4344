"""A whole training run on this machine: start, follow, sum up."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from grpo_core.clients.supervisor import SupervisorClient
from grpo_core.errors import GrpoError
from grpo_core.process.managed import ManagedProcess, ProcessFailed
from grpo_core.security.bearer_token import plain
from grpo_local.defaults import Sizes, sizes_for
from grpo_local.modes import HandOff, Mode
from grpo_local.process.health import HealthProbe
from grpo_local.process.peak_memory import MemoryPeaks
from grpo_local.process.ports import free_port
from grpo_local.process.signals import StopRequest, StopRequested
from grpo_local.process.stack import Stack, start_on_screen
from grpo_local.report.metrics_file import MetricsFile, StepRecord
from grpo_local.report.step_table import HEADER_EVERY_STEPS, header_lines, step_line
from grpo_local.report.summary import (
    Benchmark,
    RunFacts,
    read_record,
    summarise,
    summary_lines,
)
from grpo_local.run_directory import RunDirectory, create_run_directory
from grpo_local.screen import Screen
from grpo_local.services import TINY_MODEL_PATH_FILE, ServiceFactory, weights_socket_path
from grpo_local.settings import DemoSettings

FOLLOW_POLL_S = 0.2
REDIS_DEADLINE_S = 5.0
INDENT = 9 * " "


class NoTrainingStep(GrpoError):
    """All processes run, yet the trainer finished no step in time."""


def run_demo(settings: DemoSettings, screen: Screen) -> int:
    """Run it all; returns the exit status: 0, 1 after a failure, 128 + n after signal n."""
    with StopRequest() as stop_request:
        try:
            run = create_run_directory(settings.run_dir, settings.seed)
        except GrpoError as error:
            return screen.failed(error)
        try:
            _train_and_report(settings, run, screen, stop_request)
        except StopRequested as stopped:
            screen.failure(f"{stopped}; every process of this run has ended; logs: {run.logs}")
            return stopped.exit_status
        except GrpoError as error:
            return screen.failed(error)
    return 0


def _train_and_report(
    settings: DemoSettings, run: RunDirectory, screen: Screen, stop_request: StopRequest
) -> None:
    started = time.monotonic()
    sizes, mode = sizes_for(settings), settings.weight_mode
    tasks = " and ".join(settings.task)
    screen.line(f"run {run.run_id}: {sizes.steps} steps on {tasks}, files in {run.path}")
    every_steps = mode.publish_every_steps(
        sizes.vllm_restart_interval, settings.adapter_sync_interval
    )
    screen.line(f"mode {mode.name}: {mode.publication(every_steps)}")
    memory = MemoryPeaks()
    with (
        tempfile.TemporaryDirectory(prefix="grpo-") as temporary,
        HealthProbe(plain(settings.run_api_token)) as probe,
        Stack(run.logs, stop_request, memory.watch) as stack,
    ):
        factory = ServiceFactory(settings, sizes, run, probe)
        try:
            hand_off = start_services(factory, stack, screen, weights_socket_path(Path(temporary)))
            training_started = time.monotonic()
            records = follow_training(stack, run, sizes, mode, screen)
            training_s = time.monotonic() - training_started
            with SupervisorClient(
                hand_off.redis_url, hand_off.run_id, REDIS_DEADLINE_S
            ) as supervisor:
                status = supervisor.status_for_report()
        finally:
            with screen.activity("ending every process of this run"):
                stack.stop()
    with screen.activity("drawing the reward curve"):
        from grpo_local.report.plots import draw_reward_curve

        title = f"GRPO on {tasks}, seed {settings.seed}"
        draw_reward_curve(records, title, run.reward_plot)
    benchmark = run.checkpoints / "benchmark.json"
    facts = RunFacts(
        mode=mode.name,
        seed=settings.seed,
        summary=summarise(records, time.monotonic() - started, training_s),
        benchmark=read_record(Benchmark, benchmark) if benchmark.exists() else None,
        server=status,
        peak_bytes=memory.peak_bytes,
    )
    run.summary.write_text(facts.model_dump_json(indent=2) + "\n")
    screen.line("")
    screen.lines(summary_lines(facts.summary, run, mode, facts.publication), "bold")


def start_services(
    factory: ServiceFactory, stack: Stack, screen: Screen, weights_socket: Path
) -> HandOff:
    """Start the services, each on a port of its own, and wait until all are ready.

    Most of a start is importing, and the services wait for each other: they start side by side.

    Raises:
        ProcessFailed: one of them did not become ready.
        StopRequested: a stop signal arrived.
    """
    redis_port, api_port, vllm_port = free_port(), free_port(), free_port()
    hand_off = factory.hand_off(redis_port, weights_socket)
    hand_off.make_directories()
    model, path_file = factory.settings.model, factory.run.path / TINY_MODEL_PATH_FILE
    jobs = [factory.tiny_model(path_file)] if model is None else []
    start_on_screen(stack, [factory.redis(redis_port), *jobs], screen)
    model = model or path_file.read_text().strip()
    services = [
        factory.run_api(api_port, redis_port),
        factory.vllm_server(vllm_port, model, hand_off),
        factory.trainer(model, api_port, vllm_port, hand_off),
        *(factory.environment(t, model, api_port, vllm_port) for t in factory.settings.task),
    ]
    start_on_screen(stack, services, screen)
    return hand_off


def follow_training(
    stack: Stack, run: RunDirectory, sizes: Sizes, mode: Mode, screen: Screen
) -> list[StepRecord]:
    """Show every step until the trainer has ended; returns the records of all steps.

    Raises:
        ProcessFailed: a process failed, or the trainer ended before its last step.
        NoTrainingStep: `step_deadline_s` passed without a step.
        ProtocolViolation: the metrics file breaks its contract.
        StopRequested: a stop signal arrived.
    """
    metrics = MetricsFile(run.metrics)
    records: list[StepRecord] = []
    trainer = stack.process("trainer")
    last_step_at = time.monotonic()
    while True:
        finished = trainer.exit_code == 0  # asked before reading, so that no line comes after
        for record in metrics.read_new():
            if len(records) % HEADER_EVERY_STEPS == 0:
                screen.lines(header_lines(), style="bold")
            screen.line(step_line(record))
            records.append(record)
            last_step_at = time.monotonic()
            if news := mode.news(record.step, record.sync_s):
                screen.line(f"{INDENT}{news}", style="dim")
        if finished:
            if len(records) >= sizes.steps:
                return records
            raise ProcessFailed(
                f"trainer ended with status 0 after {len(records)} of {sizes.steps} steps; "
                f"see {trainer.log_path}\n{trainer.log_tail()}"
            )
        if time.monotonic() - last_step_at > sizes.step_deadline_s:
            raise NoTrainingStep(_no_step_message(sizes, len(records), trainer))
        stack.sleep(FOLLOW_POLL_S)


def _no_step_message(sizes: Sizes, done: int, trainer: ManagedProcess) -> str:
    return (
        f"no training step within {sizes.step_deadline_s:g} s, "
        f"{done} of {sizes.steps} done; see {trainer.log_path} and the other logs beside it, "
        f"or raise --step-deadline-s\n{trainer.log_tail()}"
    )
