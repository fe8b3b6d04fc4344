"""Options are parsed before torch is imported: a typo costs no seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import json, sys
from {package}.__main__ import main
for argv in json.loads(sys.argv[1]):
    try:
        main(argv)
    except SystemExit as stop:
        status = stop.code or 0
    else:
        status = "ran"
    loaded = [name for name in ("torch", "transformers", "vllm", "wandb") if name in sys.modules]
    print("status", status, loaded)
"""
"""`main` with one command line after the other."""
TRAINER = ["--model-name", "m", "--weight-bridge-mode", "shared_vllm"]
SERVER = ["--model", "m"]
MISTAKES: dict[str, list[list[str]]] = {
    "grpo_trainer": [
        [],
        [*TRAINER, "--lr", "-1"],
        [*TRAINER, "--learning-rate", "1"],
        [*TRAINER, "--use-wandb"],
    ],
    "grpo_vllm": [
        [],
        [*SERVER, "--port", "0"],
        [*SERVER, "--share-weights", "--host", "0.0.0.0"],
        [*SERVER, "--weights-socket", "/" + "x" * 120],
    ],
}


@pytest.mark.parametrize("package", MISTAKES)
def test_mistakes_and_help_end_it_without_heavy_imports(package: str) -> None:
    lines = json.dumps([*MISTAKES[package], ["--help"]])
    command = [sys.executable, "-c", PROBE.format(package=package), lines]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("status")]
    assert found == [*["status 2 []"] * len(MISTAKES[package]), "status 0 []"]
