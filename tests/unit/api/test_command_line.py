"""`--help` and wrong options end before the web framework or Redis client is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grpo_core.settings import load_settings
from grpo_core.tree.run_api import RunApiSettings
from tests.unit.conftest import Refused

HEAVY = {"fastapi", "starlette", "uvicorn", "uvloop", "redis", "prometheus_client"}


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [(["--help"], 0, "usage: run-api"), (["--port", "0"], 2, "run-api: --port: ")],
)
def test_help_and_a_mistake_are_answered_before_anything_heavy(
    words: list[str], status: int, says: str
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "grpo_api", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, says in (ended.stderr if status else ended.stdout)) == (status, True)
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "grpo_core.settings" in imported
    assert not imported & HEAVY


def test_a_bad_value_is_refused_by_name_and_a_token_is_never_shown(
    refused: Refused, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_API_TOKEN", "hunter2")
    bad = {"--redis-url": ["http://x"], "--run-id": ["a{b}"], "--token": ["hunter 2", ""]}
    for option, values in bad.items():
        for value in values:
            shown = refused(load_settings, RunApiSettings, [option, value], {})
            assert (option in shown, "hunter" in shown) == (True, False)
    with pytest.raises(SystemExit, match="0"):
        load_settings(RunApiSettings, ["--help"], {})
    assert "hunter" not in "".join(capsys.readouterr())


def test_an_empty_variable_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker Compose sets it to an empty string for `RUN_API_TOKEN=` in a .env file."""
    monkeypatch.setenv("RUN_API_TOKEN", "")
    assert load_settings(RunApiSettings, [], {}).token is None


def test_run_apis_with_different_ports_have_different_runs() -> None:
    runs = [load_settings(RunApiSettings, ["--port", port], {}) for port in ("8001", "8002")]
    assert [run.run_id for run in runs] == ["port-8001", "port-8002"]
    named = load_settings(RunApiSettings, [], {"RUN_ID": "day", "REDIS_URL": "redis://db"})
    assert (named.run_id, named.may_start_redis) == ("day", False)
    assert runs[0].may_start_redis


@pytest.mark.parametrize(
    ("words", "queued", "leased"),
    [
        ([], 4 * 2**30, 4 * 2**30),
        (["--redis-disk-bytes", "6000000"], 10**6, 10**6),
        (["--redis-disk-bytes", "6000000", "--max-queued-bytes", "5000"], 5000, 10**6),
    ],
)
def test_queue_and_leases_take_a_third_of_the_disk(
    words: list[str], queued: int, leased: int
) -> None:
    settings = load_settings(RunApiSettings, words, {})
    assert (settings.queued_bytes_limit, settings.leased_bytes_limit) == (queued, leased)
