"""One run of the demo, and the model that comes out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.left_over import processes_that_log_below

DEADLINE_S = 1800
NOISE = 1e-4
"""Of log-probabilities of float32 weights, computed by two programs."""


@dataclass(frozen=True)
class DemoRun:
    """`output`: what the user saw."""

    directory: Path
    output: str

    @property
    def records(self) -> list[dict[str, float]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def run_demo(directory: Path, *flags: str) -> DemoRun:
    """To its good end, with no process left."""
    command = [sys.executable, "-m", "grpo_local", "--run-dir", str(directory), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    logs = [f"{path}\n{path.read_text()[-5000:]}" for path in directory.glob("logs/*.log")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    assert processes_that_log_below(directory / "logs") == []
    return DemoRun(directory, done.stdout)


def load_model(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def accuracy_of(model: Any, tokenizer: Path) -> float:
    """Exact: the mean probability of the right answer over all sums, which is the expected reward
    without sampling noise."""
    from transformers import AutoTokenizer

    from grpo_tiny_model.model import expected_accuracy, sum_examples

    return expected_accuracy(model, *sum_examples(AutoTokenizer.from_pretrained(tokenizer)))
