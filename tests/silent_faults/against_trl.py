"""Puts the faults into TRL's GRPOTrainer, and lists what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from benchmarks.train_bench.sides import trl_python
from grpo_tiny_model.model import ensure_tiny_model
from tests.silent_faults.producer import SUMS

SECTION = "The same faults in TRL"
SIDE = Path(__file__).with_name("trl_side.py")
HEALTHY = "none"
RESULT = '{"fault"'
"""How a line with a result begins; TRL prints others."""
NO_VERSIONS = "GRPOTrainer's samples carry no policy version"
NO_SERVER = "needs TRL's vLLM backend, which needs a GPU"
NOT_TRIED = {
    "off-by-one version": NO_VERSIONS,
    "version of the start": NO_VERSIONS,
    "adapter without a layer": NO_SERVER,
    "adapter with other keys": NO_SERVER,
    "wrong adapter scale": NO_SERVER,
    "stale KV cache": NO_SERVER,
}
METRICS = {
    "lost update in bfloat16": "changed weights",
    "update not written": "changed weights",
    "truncated answers scored as finished": "completions/clipped_ratio",
    "reward broadcast over a group": "frac_reward_zero_std",
    "top-p logprobs not renormalised": "entropy",
    "reference that moves": "kl",
    "KL penalty with the wrong sign": "kl",
    "loss divided again": "grad_norm",
    "mean over each micro-batch": "grad_norm",
    "gradient of one micro-batch dropped": "grad_norm",
    "advantages over the batch": "grad_norm",
    "shifted logprobs": "clip_ratio/region_mean",
    "logprobs of another unit": "clip_ratio/region_mean",
    "raw logprobs": "clip_ratio/region_mean",
}
"""TRL's metric that comes nearest to showing a fault; of all others the reward."""


def table(faults: Collection[str], state: Path | None = None) -> list[str]:
    """Lines of markdown. Args: state: keeps the results, and holds those of an earlier command"""
    tried = [name for name in faults if name not in NOT_TRIED]
    lines = state.read_text().splitlines() if state is not None and state.exists() else []
    found = _by_fault(lines)
    if missing := [name for name in (HEALTHY, *tried) if name not in found]:
        found |= _run(missing, state)
    healthy = found[HEALTHY]
    named = [name for name in tried if _new(found[name], healthy)]
    lines = [
        f"TRL 1.16.0 trains the same tiny model for 13 steps with each of {len(tried)} faults, and",
        f"reports something that it does not report without the fault in {len(named)} of them.",
        f"{len(faults) - len(tried)} faults were not tried. The column of TRL's reports leaves out",
        "warnings that the run without a fault gets too. Metrics are means over the steps.",
        "",
        "| Fault | TRL reports | Nearest metric | Without the fault |",
        "|---|---|---|---|",
    ]
    for name in faults:
        if name in NOT_TRIED:
            lines.append(f"| {name} | not tried: {NOT_TRIED[name]} | | |")
            continue
        metric = METRICS.get(name, "reward")
        value, other = (run["metrics"].get(metric) for run in (found[name], healthy))
        cells = [
            name,
            _short(_new(found[name], healthy) or "nothing"),
            f"{metric} {_number(value)}",
        ]
        lines.append("| " + " | ".join([*cells, _number(other)]) + " |")
    return lines


def _new(run: dict[str, Any], healthy: dict[str, Any]) -> str:
    """What TRL reports of this run alone."""
    new = [text for text in run["told"] if text not in healthy["told"]]
    return str(run["error"] or "; ".join(new))


def _by_fault(lines: Iterable[str]) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in lines if line.startswith(RESULT)]
    return {one["fault"]: one for one in found}


def _run(faults: list[str], state: Path | None) -> dict[str, dict[str, Any]]:
    """The result of each fault, by its name."""
    work = {
        "model": str(ensure_tiny_model()),
        "faults": faults,
        "questions": [f"{a}+{b}=" for a, b in SUMS],
        "answers": [str(a + b) for a, b in SUMS],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(work, file)
        file.flush()
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        command = [str(trl_python()), str(SIDE), file.name]
        found: list[str] = []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            for line in process.stdout or ():
                found.append(line)
                if state is not None:
                    with state.open("a") as kept:
                        kept.write(line)
    return _by_fault(found)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _short(text: str) -> str:
    flat = " ".join(text.replace("|", "/").split())
    return flat if len(flat) <= 160 else flat[:157] + "..."
