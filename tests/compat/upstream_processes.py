"""Runs the archived system's code in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_local.services import child_environment
from tests.compat.upstream_install import Upstream

SCRIPTS = Path(__file__).parent / "upstream_side"
SCRIPT_DEADLINE_S = 300


class ScriptFailed(Exception):
    """A script ended with an error; its output is in the message."""


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
