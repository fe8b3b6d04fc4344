"""Options are parsed before torch is imported: a typo costs no seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "vllm", "wandb")
PROBE = """
import sys
from {package}.__main__ import main
try:
    main({argv!r})
except SystemExit as stop:
    code = stop.code or 0
else:
    code = "ran"
loaded = [name for name in {heavy!r} if name in sys.modules]
sys.stderr.write(f"RESULT {{code}} {{loaded}}")
"""

REQUIRED = ["--model-name", "m", "--weight-bridge-mode", "shared_vllm"]


@pytest.mark.parametrize(
    ("package", "argv", "status"),
    [
        ("grpo_trainer", ["--help"], 0),
        ("grpo_trainer", [], 2),
        ("grpo_trainer", [*REQUIRED, "--lr", "-1"], 2),
        ("grpo_trainer", [*REQUIRED, "--learning-rate", "1"], 2),
        ("grpo_trainer", ["--model-name", "m", "--weight-bridge-mode", "shared"], 2),
        ("grpo_trainer", [*REQUIRED, "--use-wandb"], 2),
        ("grpo_vllm", ["--help"], 0),
        ("grpo_vllm", [], 2),
        ("grpo_vllm", ["--model", "m", "--port", "0"], 2),
        ("grpo_vllm", ["--model", "m", "--share-weights", "--host", "0.0.0.0"], 2),
        ("grpo_vllm", ["--model", "m", "--weights-socket", "/" + "x" * 120], 2),
    ],
)
def test_help_and_mistakes_load_nothing_heavy(package: str, argv: list[str], status: int) -> None:
    probe = PROBE.format(package=package, argv=argv, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr.endswith(f"RESULT {status} []"), done.stderr


def test_mistakes_are_told_one_per_line_with_the_option() -> None:
    wrong = [
        "--model-name",
        "m",
        "--weight-bridge-mode",
        "shared_vllm",
        "--lr",
        "-1",
        "--seed",
        "x",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "grpo_trainer", *wrong], capture_output=True, text=True, timeout=120
    )
    lines = done.stderr.strip().splitlines()
    assert [line.split(" ")[1] for line in lines] == ["--lr:", "--seed:"]
    assert "greater than 0" in lines[0]
