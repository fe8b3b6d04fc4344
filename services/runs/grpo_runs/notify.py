"""Notifications of a run: a command or a webhook is told that the run ended, or needs a person.

Each is delivered by a process of its own within a deadline, while the run goes on. One that fails
or hangs is shown once, and changes nothing else. As a program, this module sends the webhook.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from grpo_core.settings import hide_secrets
from grpo_core.settings.command import holds_secret
from grpo_core.sockets import no_proxy

DEADLINE_S = 10.0
_SHOWN_CHARACTERS = 200
_URL_VARIABLE = "GRPO_NOTIFY_URL"
_WEBHOOK = (sys.executable, "-m", "grpo_runs.notify")


@dataclass(frozen=True)
class Notification:
    """What is told.

    Args:
        event: "end" or "alert"
        state: completed, failed or stopped; of an alert its severity
        text: for a person, of one or several lines
        directory: of the run's files
        step: newest step, of a run whose services are all started here; 0 before the first
        last_step: of the whole run
        alert: name of the alert; "" at the end
    """

    event: str
    run: str
    state: str
    text: str
    directory: str
    step: int = 0
    last_step: int = 0
    alert: str = ""

    def variables(self) -> dict[str, str]:
        return {f"GRPO_{name.upper()}": str(value) for name, value in asdict(self).items()}


def is_webhook(target: str) -> bool:
    return target.startswith(("http://", "https://"))


class Notifier:
    """Delivers notifications.

    Args:
        targets: by event, a command or an http(s) URL; None: nothing is told
        warn: shows a message to the user
        secrets: texts that no notification may contain
    """

    def __init__(
        self,
        targets: Mapping[str, str | None],
        warn: Callable[[str], None],
        secrets: Iterable[str] = (),
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._targets = targets
        self._warn = warn
        self._secrets = [secret for secret in secrets if secret]
        self._deadline_s = deadline_s
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def send(self, told: Notification) -> None:
        """Begin to deliver. Never raises and never waits."""
        if (target := self._targets.get(told.event)) is None:
            return
        told = Notification(**(asdict(told) | {"text": self._without_secrets(told.text)}))
        thread = threading.Thread(target=self._deliver, args=(target, told), daemon=True)
        self._threads.append(thread)
        thread.start()

    def finish(self) -> None:
        """Wait until all are delivered, or their deadlines have passed."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return hide_secrets(text)

    def _deliver(self, target: str, told: Notification) -> None:
        # Variables that this project's commands read may hold secrets; the user's others stay.
        environment = {n: value for n, value in os.environ.items() if not holds_secret(n)}
        environment |= told.variables() | no_proxy(os.environ)
        words: Sequence[str] = _WEBHOOK
        if is_webhook(target):
            environment[_URL_VARIABLE] = target  # other users can read command lines
        else:
            words = shlex.split(target)
        problem = self._problem_of(words, json.dumps(asdict(told)), environment)
        if problem is not None:
            if is_webhook(target):
                problem = problem.replace(target, "the URL")
            with self._lock:
                is_first = told.event not in self._warned
                self._warned.add(told.event)
            if is_first:
                self._warn(
                    f"--on-{told.event}: the notification was not delivered: "
                    f"{self._without_secrets(problem)}; this does not affect the run, and later "
                    "failures are not shown"
                )

    def _problem_of(
        self, words: Sequence[str], text: str, environment: Mapping[str, str]
    ) -> str | None:
        """None if the process has taken the text."""
        name = "the webhook" if words is _WEBHOOK else words[0]
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                process_group=0,  # in this session, or it would look like an adopted process
            )
        except OSError as error:
            return f"{name}: {error.strerror}"
        try:
            _, errors = process.communicate(text, timeout=self._deadline_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"{name} did not end within {self._deadline_s:g} s"
        if process.returncode == 0:
            return None
        said = errors.strip().rpartition("\n")[2][-_SHOWN_CHARACTERS:]
        return f"{name} ended with status {process.returncode}" + (f": {said}" if said else "")


def secrets_of(variables: Mapping[str, str], *others: str | None) -> list[str]:
    """Texts to keep out of notifications."""
    held = [
        value
        for name, value in variables.items()
        if holds_secret(name) and ("@" in value or not name.endswith("_URL"))
    ]
    return [text for text in (*held, *others) if text]


def unusable_target(target: str) -> str | None:
    """The problem of a value of --on-end or --on-alert."""
    if is_webhook(target):
        return None
    try:
        words = shlex.split(target)
    except ValueError as error:
        return f"cannot split the command into words as a shell does ({error}); check its quotes"
    if not words:
        return "expected a command or an http(s) URL"
    if shutil.which(words[0]) is None:
        return f"no such command: {words[0]}; name a program, or an http(s) URL"
    return None


def main() -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "grpo-run"}
    try:
        url, body = os.environ[_URL_VARIABLE], sys.stdin.buffer.read()
        urllib.request.urlopen(urllib.request.Request(url, body, headers, method="POST")).close()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
