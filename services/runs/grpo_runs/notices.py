"""What a local run tells with --on-end and --on-alert."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from pydantic import SecretStr

from grpo_core.alerts import AlertWatch, FiringAlert, Measures
from grpo_core.errors import GrpoError
from grpo_core.redis.url import known_password
from grpo_core.security import plain
from grpo_runs.measures import MeasuresReader
from grpo_runs.notify import Notification, Notifier, secrets_of
from grpo_runs.process.stack import StopRequested, warn
from grpo_runs.report.summary import RunFacts, read_record
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import Screen
from grpo_runs.settings.launch_options import LaunchOptions
from grpo_runs.watch.followed_file import FollowedFile

LOOK_EVERY_S = 5.0


def notifier_of(
    settings: LaunchOptions, warn: Callable[[str], None], redis_password: str | None = None
) -> Notifier:
    # The password of a URL is hidden wherever a URL is.
    held = [plain(v) for name, v in settings if isinstance(v, SecretStr) and name != "redis_url"]
    secrets = secrets_of(os.environ, *held, redis_password)
    targets = {"end": settings.on_end, "alert": settings.on_alert}
    return Notifier(targets, warn, secrets)


class RunNotices:
    """Of a run whose services are all started here."""

    def __init__(self, settings: LaunchOptions, run: RunDirectory, screen: Screen) -> None:
        self._settings = settings
        self._run = run
        shown = partial(warn, screen, run.logs, "NotificationFailed")
        self._notifier = notifier_of(settings, shown, known_password(run.redis))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, run_api_url: str) -> None:
        """Look for alerts from now on, in a thread."""
        if self._settings.on_alert is None:
            return
        token = plain(self._settings.run_api_token)
        read = MeasuresReader(self._run, run_api_url, token).read
        looks = (read, self._tell_alert, self._stop.wait)
        self._thread = threading.Thread(target=tell_alerts, args=looks, daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Look no more, and wait until what was begun is delivered: what still runs afterwards is
        ended with the services."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._notifier.finish()

    @contextmanager
    def of_the_end(self) -> Iterator[None]:
        """Tell how the context ends. `settle` waits until that is delivered."""
        try:
            yield
        except StopRequested as stopped:
            self._tell_end("stopped", str(stopped))
            raise
        except GrpoError as error:
            self._tell_end("failed", f"{type(error).__name__}: {error}")
            raise
        with suppress(GrpoError):  # the run has succeeded, whatever becomes of its summary
            summary = read_record(RunFacts, self._run.summary).summary
            rewards = f"{summary.first_reward:.3f} to {summary.last_reward:.3f}"
            self._tell_end("completed", f"mean reward {rewards}; {summary.total_s:.0f} s")

    def _tell_end(self, state: str, text: str) -> None:
        self._notifier.send(self._told("end", state, f"run {self._run.run_id} {state}: {text}"))

    def _told(self, event: str, state: str, text: str, alert: str = "") -> Notification:
        return Notification(
            event=event,
            run=self._run.run_id,
            state=state,
            text=text,
            directory=str(self._run.path.absolute()),
            step=len(FollowedFile(self._run.metrics).new_lines()),
            last_step=self._settings.steps,
            alert=alert,
        )

    def _tell_alert(self, firing: FiringAlert) -> None:
        alert = firing.alert
        text = f"run {self._run.run_id}: {firing.text} Advice: {alert.advice}"
        self._notifier.send(self._told("alert", alert.severity.value, text, alert.name))


def tell_alerts(
    read: Callable[[], Measures],
    tell: Callable[[FiringAlert], None],
    wait: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Tell each alert once, when it begins to fire, until `wait` returns True."""
    watch, told = AlertWatch(), dict[str, float]()
    while not wait(LOOK_EVERY_S):
        for firing in watch.look(read(), clock()):
            if told.get(firing.alert.name) != firing.since:
                told[firing.alert.name] = firing.since
                tell(firing)
