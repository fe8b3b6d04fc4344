"""Writes tasks in the form of Harbor."""

from __future__ import annotations

from pathlib import Path

WRITES_NUMBER = """#!/bin/bash
if [ "$(cat /app/answer.txt)" = 7 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(
    directory: Path,
    instruction: str,
    *,
    config: str = "",
    image: str = "ubuntu:24.04",
    tests: str = WRITES_NUMBER,
) -> Path:
    """The files that `harbor task init --verifier-mode shared` makes, filled in."""
    files = {
        "instruction.md": instruction,
        "task.toml": f'schema_version = "1.4"\n{config}',
        "environment/Dockerfile": f"FROM {image}\nWORKDIR /app\n",
        "tests/test.sh": tests,
    }
    for name, text in files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory
