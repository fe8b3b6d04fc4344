"""Runs `grpo-demo` in a directory of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def demo_records(flags: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of each step. Raises `CalledProcessError` if the run failed."""
    command = [sys.executable, "-m", "grpo_runs", *flags]
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
        metrics = Path(directory) / "runs" / "latest" / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_text().splitlines()]
