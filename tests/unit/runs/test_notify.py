"""Notifications with real processes and real HTTP: what they contain, and that a failure of one
changes nothing."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from grpo_core.alerts import FiringAlert, Measures
from grpo_runs.notices import tell_alerts
from grpo_runs.notify import Notification, Notifier, secrets_of, unusable_target
from tests.support.http_stub import Route, stub_server
from tests.support.process_table import is_alive
from tests.support.wait import DEADLINE_S, wait_for

END = Notification("end", "my-run", "failed", "ServiceGone: see x", "/runs/my-run", 7, 60)


def notified(target: str, *told: Notification, **how: Any) -> list[str]:
    """The warnings."""
    warnings: list[str] = []
    notifier = Notifier({"end": target, "alert": target}, warnings.append, **how)
    for each in told or (END,):
        notifier.send(each)
    notifier.finish()
    return warnings


def webhook(status: int) -> dict[str, Route]:
    return {"POST /hook/s3cret": lambda _body: (status, {})}


def test_a_command_gets_the_facts_as_json_and_as_variables(tmp_path: Path) -> None:
    script = "import json, os, sys; print(json.dumps([json.load(sys.stdin), dict(os.environ)]))"
    file = tmp_path / "told.json"
    assert notified(f"sh -c '{sys.executable} -c \"{script}\" > {file}'") == []
    told, variables = json.loads(file.read_text())
    assert told == {
        **{"event": "end", "run": "my-run", "state": "failed", "text": "ServiceGone: see x"},
        **{"directory": "/runs/my-run", "step": 7, "last_step": 60, "alert": ""},
    }
    assert (
        variables.items()
        >= {
            **{"GRPO_EVENT": "end", "GRPO_RUN": "my-run", "GRPO_STATE": "failed"},
            **{"GRPO_TEXT": "ServiceGone: see x", "GRPO_STEP": "7", "GRPO_LAST_STEP": "60"},
        }.items()
    )


def test_a_webhook_gets_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    alert = Notification("alert", "r", "critical", "t", "/d", 1, 2, "no-environment")
    with stub_server(webhook(204)) as server:
        assert notified(f"{server.url}/hook/s3cret", END, alert) == []
    told = sorted(server.bodies("POST /hook/s3cret"), key=lambda body: body["event"])
    assert told == [asdict(alert), asdict(END)]


def test_no_secret_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"RUN_API_TOKEN": "t0ken", "REDIS_URL": "redis://:pa55@db", "WANDB_API_KEY": "wkey"}
    ours |= {"TEACHER_API_KEY": "tkey"}
    for name, value in {**ours, "GRPO_VLLM_API_KEY": "vkey", "SLACK_TOKEN": "theirs"}.items():
        monkeypatch.setenv(name, value)
    text = (
        "401 for t0ken; redis://:pa55@db is away, http://me:pw1@host too; grpo --hf-token hf_1 "
        "--run-api-token=other2 --lr 1; tkey; password redis-pass"
    )
    told = Notification("end", "r", "failed", text, "/d")
    file = tmp_path / "told"
    secrets = secrets_of(ours, "redis-pass", None)
    assert notified(f"sh -c 'cat > {file}; env >> {file}'", told, secrets=secrets) == []
    written = file.read_text()
    for secret in ("t0ken", "pa55", "wkey", "tkey", "vkey", "pw1", "hf_1", "other2", "redis-pass"):
        assert secret not in written
    assert "SLACK_TOKEN=theirs" in written, "the user's own variables are the user's"
    assert "--lr 1; ***; password ***" in written


def test_a_failure_is_shown_once_and_without_the_secret_of_its_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with stub_server(webhook(500)) as server:
        (warning,) = notified(f"{server.url}/hook/s3cret", END, END)
    assert len(server.seen) == 2
    assert "--on-end: the notification was not delivered: the webhook" in warning
    assert "500" in warning
    assert "s3cret" not in warning
    (warning,) = notified("sh -c 'echo no such channel >&2; exit 3'")
    assert "sh ended with status 3: no such channel; this does not affect the run" in warning
    (warning,) = notified("no-such-program")
    assert "no-such-program: No such file" in warning


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    (warning,) = notified(f"sh -c 'sleep 600 & echo $! > {file}; wait'", deadline_s=0.5)
    assert "sh did not end within 0.5 s" in warning
    if file.exists():  # on a slow machine it was killed before
        wait_for(lambda: not is_alive(int(file.read_text())))


def test_a_server_that_never_answers_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (warning,) = notified(f"http://127.0.0.1:{silent.getsockname()[1]}/", deadline_s=0.5)
    assert "the webhook did not end within 0.5 s" in warning


def test_the_run_goes_on_while_a_notification_is_delivered(tmp_path: Path) -> None:
    fifo, warnings = tmp_path / "fifo", list[str]()
    os.mkfifo(fifo)
    notifier = Notifier({"end": f"cat {fifo}"}, warnings.append, deadline_s=DEADLINE_S)
    notifier.send(END)
    fifo.write_text("the command ends only now\n")
    notifier.finish()
    assert warnings == []


def test_without_a_target_nothing_is_told() -> None:
    warnings: list[str] = []
    notifier = Notifier({"end": None}, warnings.append)
    notifier.send(END)
    notifier.finish()
    assert warnings == []


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("no-such-program --x", "no such command: no-such-program"),
        ("sh -c 'x", "cannot split the command"),
        (" ", "expected a command or an http"),
        ("https://hooks.example.com/x", None),
        ("sh -c 'x'", None),
    ],
)
def test_a_target_that_cannot_work_is_named_at_the_start(target: str, problem: str | None) -> None:
    found = unusable_target(target)
    assert (found is None) if problem is None else problem in str(found)


def test_each_alert_is_told_once_and_again_when_it_begins_again() -> None:
    slow, fine = Measures(over_step_s=901), Measures(over_step_s=1)
    looks = iter([fine, slow, slow, fine, slow])
    stops = iter([False] * 5 + [True])
    clock = iter(range(100, 200, 5))
    told: list[FiringAlert] = []
    tell_alerts(lambda: next(looks), told.append, lambda _: next(stops), lambda: next(clock))
    assert [(each.alert.name, each.since) for each in told] == [
        ("no-training-step", 105),
        ("no-training-step", 120),
    ]
