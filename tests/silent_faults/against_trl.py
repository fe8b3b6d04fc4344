"""Puts five of the faults into TRL's GRPOTrainer, and lists what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.train_bench.sides import trl_python
from grpo_tiny_model.model import ensure_tiny_model
from tests.silent_faults.producer import SUMS

SIDE = Path(__file__).with_name("trl_side.py")
HEALTHY = "none"


@dataclass(frozen=True)
class TrlFault:
    """`injected`: how; `metric`: TRL's metric that comes nearest to showing it"""

    injected: str
    metric: str


FAULTS = {
    "NaN reward as 0": TrlFault("the reward function returns NaN for 30 %", "reward"),
    "lost update in bfloat16": TrlFault(
        "the model is loaded in bfloat16, learning rate 1e-6", "changed weights"
    ),
    "truncated answers scored as finished": TrlFault(
        "`max_completion_length=2`", "completions/clipped_ratio"
    ),
    "reward broadcast over a group": TrlFault(
        "the reward function returns the group's mean", "frac_reward_zero_std"
    ),
    "top-p logprobs not renormalised": TrlFault("`top_p=0.8`", "entropy"),
}


def table() -> list[str]:
    """Lines of markdown."""
    python, model = trl_python(), ensure_tiny_model()
    healthy = _run(python, model, HEALTHY)
    lines = [
        "TRL 1.16.0 trains the same tiny model for 13 steps with each fault. The column of TRL's",
        "reports leaves out warnings that the run without a fault gets too.",
        "",
        "| Fault | Injected | TRL reports | Nearest metric | Without the fault |",
        "|---|---|---|---|---|",
    ]
    for name, fault in FAULTS.items():
        found = _run(python, model, name)
        new = [text for text in found["told"] if text not in healthy["told"]]
        says = found["error"] or "; ".join(new) or "nothing"
        value, other = (run["metrics"].get(fault.metric) for run in (found, healthy))
        cells = [name, fault.injected, _short(says), f"{fault.metric} {_number(value)}"]
        lines.append("| " + " | ".join([*cells, _number(other)]) + " |")
    return lines


def _run(python: Path, model: Path, fault: str) -> dict[str, Any]:
    work = {
        "model": str(model),
        "fault": fault,
        "questions": [f"{a}+{b}=" for a, b in SUMS],
        "answers": [str(a + b) for a, b in SUMS],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(work, file)
        file.flush()
        done = subprocess.run(
            [str(python), str(SIDE), file.name],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _short(text: str) -> str:
    flat = " ".join(text.replace("|", "/").split())
    return flat if len(flat) <= 160 else flat[:157] + "..."
