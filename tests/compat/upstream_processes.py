"""Runs other projects' code with their own interpreters."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from grpo_local.services import child_environment

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "upstream_side"
SCRIPT_DEADLINE_S, TESTS_DEADLINE_S = 300, 400


class ScriptFailed(Exception):
    """A script ended with an error; its output is in the message."""


def run_script(python: Path, script: str, request: Any, directory: Path) -> Any:
    """Run a script of `upstream_side/`; JSON in, JSON out. Raises `ScriptFailed`."""
    request_path, answer_path = directory / "request.json", directory / "answer.json"
    request_path.write_text(json.dumps(request))
    wandb = {"WANDB_MODE": "offline", "WANDB_DIR": str(directory)}
    done = subprocess.run(
        [str(python), str(SCRIPTS / script), str(request_path), str(answer_path)],
        env={**os.environ, **child_environment(1, str(directory)), **wandb},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SCRIPT_DEADLINE_S,
    )
    if done.returncode != 0:
        raise ScriptFailed(f"{script} ended with status {done.returncode}\n{done.stdout}")
    return json.loads(answer_path.read_text())


def require_passed(
    python: Path,
    words: Sequence[str | Path],
    path: Sequence[Path],
    directory: Path,
    tests: int,
    **variables: str,
) -> None:
    """Run pytest in the repository's root: so many tests must pass, and none may be skipped.

    Args:
        path: of Python
        directory: of the report
    """
    report = directory / "report.xml"
    done = subprocess.run(
        [
            *(str(python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"),
            *map(str, words),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables},
        capture_output=True,
        text=True,
        timeout=TESTS_DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    suite = ElementTree.parse(report).find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": tests, "failures": 0, "errors": 0, "skipped": 0}
