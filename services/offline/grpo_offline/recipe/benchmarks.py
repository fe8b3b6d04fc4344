"""Evaluates the trained model on other tasks, with `env-server TASK evaluate`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_env.loading import problem_of
from grpo_offline.errors import BenchmarkFailed, RecipeInvalid
from grpo_offline.keys import OfflineKeys

FILE = "benchmarks.jsonl"
"""Below the run's directory, one line for each."""


@dataclass(frozen=True)
class Benchmark:
    """A task, and data in the place of its own."""

    task: str
    data: str | None


def benchmarks_of(words: Sequence[str], keys: OfflineKeys) -> list[Benchmark]:
    """`math` or `gsm8k=DIR`. Raises `RecipeInvalid`: there is no such task, or no server."""
    if words and keys.generation.backend == "local":
        raise RecipeInvalid("benchmarks: need a server; set use_vllm")
    return [*_read(words)]


def _read(words: Sequence[str]) -> Iterator[Benchmark]:
    for word in words:
        task, _, data = word.partition("=")
        if problem := problem_of(task):
            raise RecipeInvalid(f"benchmarks: {problem}")
        yield Benchmark(task, data or None)


def evaluate(benchmark: Benchmark, keys: OfflineKeys, directory: Path) -> None:
    """Raises `BenchmarkFailed`. Its output goes to the screen."""
    data = ["--data", benchmark.data] if benchmark.data else []
    command = [
        *(sys.executable, "-m", "grpo_env", benchmark.task, "evaluate"),
        *("--model", keys.model.train_id),
        *("--tokenizer", keys.env_server.get("tokenizer", keys.model.train_id)),
        *("--inference-url", keys.generation.base_url),
        *("--eval-output", str(directory / FILE)),
        *("--eval-items", str(keys.eval.num_ids)),
        *("--eval-samples", str(keys.eval.replicates)),
        *("--temperature", str(keys.eval.temperature)),
        *("--log-level", keys.logging.level),
        *data,
    ]
    done = subprocess.run(command)
    if done.returncode != 0:
        raise BenchmarkFailed(
            f"{benchmark.task}: the evaluation ended with status {done.returncode}; run it again: "
            f"{' '.join(command[2:])}"
        )
