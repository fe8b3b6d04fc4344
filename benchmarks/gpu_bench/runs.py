"""Whole runs with a model of random weights: restarts of the engine, and the page of a run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench.bench import Deadline, GpuBench
from grpo_core.errors import GrpoError
from grpo_core.process import ManagedProcess

ROOT = Path(__file__).parents[2]
SMALL = (
    *("--task", f"{Path(__file__).parent / 'even_tokens.py'}:reward"),
    *("--data", str(ROOT / "examples/sums.jsonl"), "--eval-every", "0", "--seq-len", "128"),
    *("--batch-size", "32", "--gradient-accumulation-steps", "1", "--max-completion-tokens", "16"),
    *("--no-compile", "--kv-cache-mib", "64", "--server.max-num-seqs", "32"),
)
"""Options of a run that takes little more time than the start of its server."""
RESTARTS, EVERY_STEPS, DEMO_STEPS = 2, 2, 8
RUN_DEADLINE_S = 300.0
PAGES = ("report.html", "reward.png")


class RunFailed(GrpoError):
    """`grpo-demo` failed, or did not do what was asked of it."""


def measure_restarts(bench: GpuBench, _until: Deadline) -> None:
    """`lora_restart` with CUDA graphs, to its end. Raises `RunFailed`."""
    words = ("--mode", "lora_restart", "--vllm-restart-interval", str(EVERY_STEPS))
    run = _run(bench, "restart", *words, "--steps", str(RESTARTS * EVERY_STEPS))
    published_s = [s for record in _records(run) if (s := record["train/sync_time"])]
    bench.say("lora_restart, 2 restarts of the engine: until it serves", "s", published_s)
    [server] = json.loads((run / "summary.json").read_text())["servers"]
    found = {name: server[name] for name in ("restarts", "dropped_requests", "crashes")}
    bench.add([f"- {', '.join(f'{name}: {count}' for name, count in found.items())}"])
    if [*found.values()] != [RESTARTS, 0, 0]:
        raise RunFailed(f"{RESTARTS} restarts, without a dropped request or a crash, were expected")


def measure_demo(bench: GpuBench, _until: Deadline) -> None:
    """`grpo-demo` in `shared_vllm`; its page and its plot come to lie beside the results. Raises
    `RunFailed`."""
    words = ("--mode", "shared_vllm", "--steps", str(DEMO_STEPS), "--eager", "--report")
    run = _run(bench, "demo", *words)
    records = _records(run)
    bench.say("shared_vllm: a step", "s", [record["train/step_time"] for record in records])
    bench.say("shared_vllm: of it, the publication", "s", [r["train/sync_time"] for r in records])
    if bench.results is not None:
        for name in PAGES:
            shutil.copy(run / name, bench.results.parent / f"demo-{name}")


def _run(bench: GpuBench, name: str, *words: str) -> Path:
    """The directory of a run of `grpo-demo`, once that has ended."""
    bench.stop_servers()
    run = bench.directory / name
    command = [sys.executable, "-m", "grpo_runs", "--model", str(bench.model), *SMALL, *words]
    variables = {"VLLM_CACHE_ROOT": str(bench.kept / "vllm-cache" / "runs")}
    process = ManagedProcess(
        name, [*command, "--run-dir", str(run)], bench.directory / f"{name}.log", variables
    )
    try:
        code = process.wait(RUN_DEADLINE_S)
    finally:
        process.stop()
        sys.stdout.write(process.log_text())
    if code:
        logs = [f"{path.name}: {path.read_text()[-2000:]}" for path in run.glob("logs/*.log")]
        sys.stdout.write("\n".join([*logs, ""]))
        raise RunFailed(process.log_tail())
    return run


def _records(run: Path) -> list[dict[str, Any]]:
    """Of the steps, by their metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
