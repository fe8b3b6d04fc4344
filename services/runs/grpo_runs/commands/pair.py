"""`grpo-run` without a task: the inference server and the trainer, from start to stop."""

from __future__ import annotations

import contextlib

from grpo_core.errors import GrpoError
from grpo_core.process import ManagedProcess, ProcessFailed
from grpo_core.redis.keys import default_run_id
from grpo_core.redis.server import LocalRedis
from grpo_core.redis.url import local_redis_directory
from grpo_core.settings.machine import MADE_HERE
from grpo_core.temporary import temporary_directory
from grpo_core.tree.sections import TRAINER
from grpo_runs.notices import notifier_of
from grpo_runs.notify import Notification
from grpo_runs.process.health import HealthProbe
from grpo_runs.process.stack import Stack, StopRequest, StopRequested, start_on_screen
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import EXIT_FAILED, Screen
from grpo_runs.services import (
    make_model,
    make_weights_directory,
    server_of,
    trainer_of,
    weights_socket_path,
)
from grpo_runs.settings.run import RunSettings
from grpo_runs.settings.views import Places
from grpo_runs.watch.followed_file import FollowedFile
from grpo_runs.watch.news import ServiceNews

SIGNALLED = 128
"""Exit statuses above it: a signal ended the trainer."""


def run_pair(settings: RunSettings, screen: Screen) -> int:
    """`start_pair`, and tells its end."""
    status = start_pair(settings, screen)
    state = "completed" if status == 0 else "stopped" if status > SIGNALLED else "failed"
    run = settings.run_id or default_run_id(settings.port)
    notifier = notifier_of(settings, screen.warning)
    notifier.send(
        Notification(
            event="end",
            run=run,
            state=state,
            text=f"run {run} {state}: grpo-run ended with status {status}",
            directory=str(settings.save_path.absolute()),
        )
    )
    notifier.finish()
    return status


def start_pair(settings: RunSettings, screen: Screen) -> int:
    """Starts server and trainer, for a run without --task. Returns the trainer's exit status, or
    128 + n if signal n ended it. If the trainer was not started: 1 after a failure, 128 + n after
    signal n."""
    news = ServiceNews(screen, settings.log_dir, RunDirectory(settings.save_path), shown=TRAINER)
    with (
        StopRequest() as stop_request,
        temporary_directory() as temporary,
        HealthProbe() as probe,
        contextlib.ExitStack() as resources,
        Stack(settings.log_dir, stop_request, news.watch, settings.stop_grace_s) as stack,
    ):
        try:
            model = settings.model
            if model in MADE_HERE:
                model = make_model(stack, screen, model)
            places = Places.of(settings, model, weights_socket_path(temporary))
            make_weights_directory(settings, places)
            if settings.may_start_redis:
                resources.enter_context(LocalRedis(local_redis_directory()))
            servers = [server_of(settings, places, probe, n) for n in range(settings.servers)]
            start_on_screen(stack, servers, screen)
        except StopRequested as stopped:
            screen.failure(f"{stopped} before the trainer was started")
            return stopped.exit_status
        except GrpoError as error:
            return screen.failed(error)
        log = FollowedFile(settings.log_dir / f"{TRAINER}.log")

        def show_log() -> None:
            screen.lines(log.new_lines())
            stack.warn_of_lost(screen)

        try:
            with screen.waiting(news.waited_for):
                code = stack.join([trainer_of(settings, places, probe)], show_log)[TRAINER]
        except StopRequested:
            code = _pass_on(stop_request, stack.process(TRAINER), settings.stop_grace_s)
            show_log()
        except GrpoError as error:
            news.repeat()
            return screen.failed(error)
        news.look()
        news.repeat()
        return code if code >= 0 else 128 - code


def _pass_on(stop_request: StopRequest, trainer: ManagedProcess, grace_s: float) -> int:
    """Pass the stop signal on and wait for the trainer's end, or for a second signal."""
    trainer.signal(stop_request.received[0])
    try:
        return trainer.wait(grace_s, hurry=lambda: stop_request.is_urgent)
    except ProcessFailed:
        return EXIT_FAILED
