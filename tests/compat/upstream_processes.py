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

import psutil

from grpo_core.process import ManagedProcess
from grpo_local.services import child_environment
from tests.compat.upstream_install import Upstream
from tests.fixtures.inference import InferenceServer
from tests.support.wait import wait_for

SCRIPTS = Path(__file__).parent / "upstream_side"
SCRIPT_DEADLINE_S = 300
MAX_TOKEN_LENGTH = 128


class ScriptFailed(Exception):
    """A script ended with an error; its output is in the message."""


def start_environment(
    upstream: Upstream, api_url: str, server: InferenceServer, directory: Path, *flags: str
) -> ManagedProcess:
    """Start atroposlib's side as its users do: with the command line of its environment base.

    Groups of 4 unless `flags` say otherwise; ends by itself after the number of steps that the
    trainer announced.
    """
    command = [
        *(str(upstream.python), str(SCRIPTS / "sums_environment.py"), "serve"),
        *("--env.rollout_server_url", api_url),
        *("--env.tokenizer_name", str(server.model)),
        *("--env.max_token_length", str(MAX_TOKEN_LENGTH)),
        "--env.total_steps=-1",
        "--env.use_wandb=False",
        *("--openai.server_type", "vllm"),
        *("--openai.base_url", f"{server.url}/v1"),
        *("--openai.model_name", str(server.model)),
        *("--openai.api_key", "x"),
        *flags,
    ]
    log = directory / "environment.log"
    return ManagedProcess(
        "environment", command, log, child_environment(threads=1, model=str(server.model))
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
    python: Sequence[str],
    script: str,
    request: Any,
    directory: Path,
    environment: dict[str, str],
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
