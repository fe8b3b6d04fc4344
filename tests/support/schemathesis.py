"""Runs schemathesis, which sends requests that an OpenAPI document allows, and others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEADLINE_S = 3600.0


def ask(url: str, settings: Path, directory: Path, *options: str, token: str | None = None) -> str:
    """Ask the server at `url` the same each time. Returns the report, which has no failures.

    Args:
        settings: the configuration of schemathesis
        directory: in which schemathesis may write files
        token: of requests; others must be answered with 401
    """
    command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(settings)]
    command += ["run", f"{url}/openapi.json", "--no-color", "--generation-deterministic", *options]
    if token is not None:
        command += ["--header", f"Authorization: Bearer {token}"]
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
