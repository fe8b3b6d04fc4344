"""Runs the archived system's code in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from grpo_core.process import ManagedProcess
from grpo_runs.services import child_environment
from tests.compat.upstream_install import PINS, NoPackageIndex, Upstream, ensure_upstream
from tests.fixtures.inference import InferenceServer
from tests.support.pages import command
from tests.support.wait import wait_for

SCRIPTS = Path(__file__).parent / "upstream_side"
SCRIPT_DEADLINE_S = 300
TESTS_DEADLINE_S = 400
TUTORIAL = "docs/tutorials/atropos-environment.md"


def installed(pins: Path = PINS) -> Upstream:
    """The pins' own environment; skips the test without a package index."""
    try:
        return ensure_upstream(pins)
    except NoPackageIndex as error:
        pytest.skip(f"no package index: {error}")


def require_passes(
    command: Sequence[str | Path], tests: int, directory: Path, **variables: str
) -> None:
    """Run pytest of another environment; that many tests pass, and none is skipped."""
    report = directory / "report.xml"
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--junitxml={report}"],
        cwd=directory,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=TESTS_DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    suite = ElementTree.parse(report).find("testsuite")
    assert suite is not None
    counts = [int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == [tests, 0, 0, 0], counts


class ScriptFailed(Exception):
    """A script ended with an error; its output is in the message."""


def start_environment(
    upstream: Upstream, api_url: str, server: InferenceServer, directory: Path, sizes: str
) -> ManagedProcess:
    """Start atroposlib's side with the command of the tutorial. Ends by itself after the number of
    steps that the trainer announced. Args: sizes: options that replace `--env.group_size 4`"""
    of_the_page = {
        "http://127.0.0.1:8000": api_url,
        "http://127.0.0.1:9001": server.url,
        "my-model": str(server.model),
        "--env.group_size 4": sizes,
    }
    _, script, *words = command(TUTORIAL, "sums_environment.py serve", of_the_page)
    return ManagedProcess(
        "environment",
        [str(upstream.python), str(SCRIPTS / script), *words],
        directory / "environment.log",
        child_environment(threads=1, model=str(server.model)),
    )


def run_script(upstream: Upstream, script: str, request: Any, directory: Path) -> Any:
    """Run a script of `upstream_side/` beside atroposlib; JSON in, JSON out."""
    wandb = {"WANDB_MODE": "offline", "WANDB_DIR": str(directory)}
    return _run([str(upstream.python)], script, request, directory, wandb)


def run_archived_trainer(upstream: Upstream, request: Any, directory: Path) -> Any:
    """Run the archived trainer with this interpreter and its packages; it needs torch."""
    path = {"PYTHONPATH": str(upstream.wheel)}
    return _run([sys.executable], "archived_trainer.py", request, directory, path)


def _run(
    python: Sequence[str], script: str, request: Any, directory: Path, environment: dict[str, str]
) -> Any:
    """Raises `ScriptFailed`."""
    request_path, answer_path = directory / "request.json", directory / "answer.json"
    request_path.write_text(json.dumps(request))
    done = subprocess.run(
        [*python, str(SCRIPTS / script), str(request_path), str(answer_path)],
        env={**os.environ, **child_environment(1, str(directory)), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SCRIPT_DEADLINE_S,
    )
    if done.returncode != 0:
        raise ScriptFailed(f"{script} ended with status {done.returncode}\n{done.stdout}")
    return json.loads(answer_path.read_text())


def left_in_session_of(process: ManagedProcess) -> list[int]:
    """Ids of the processes that `process` started, itself included, that do not end."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not _alive_in_session(process.pid))
    return _alive_in_session(process.pid)


def _alive_in_session(session: int) -> list[int]:
    found = []
    for candidate in psutil.process_iter():
        try:
            ours = os.getsid(candidate.pid) == session
            if ours and candidate.status() != psutil.STATUS_ZOMBIE:
                found.append(candidate.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):  # ended meanwhile
            continue
    return found
