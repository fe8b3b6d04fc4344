"""How long the live page's service takes for a long run: `python -m benchmarks.watch`.

Makes a run of 10,000 recorded steps with 100 completions each (1,000,000 in all), serves it, and
asks for what the page asks for. Prints the median time and the size of each answer, and the memory
of the service.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from grpo_core.rollouts.files import ROLLOUTS, write_step
from grpo_core.rollouts.record import RolloutRecord
from grpo_runs.watch.serve import PageServer, live_runs

GROUP = 10
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--completions", type=int, default=100, help="of a step")
    parser.add_argument("--tokens", type=int, default=40, help="of a completion")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grpo-watch-") as directory:
        run = Path(directory) / "long"
        started = time.monotonic()
        make_run(run, options.steps, options.completions, options.tokens)
        tell(f"made {options.steps} steps in {time.monotonic() - started:.0f} s")
        measure(run, options.steps, options.repeats)


def make_run(path: Path, steps: int, completions: int, tokens: int) -> None:
    """Step after step, as the trainer writes them."""
    draw = random.Random(0)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("task: {name: [sums]}\n")
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(metrics_of(step, steps, draw)) + "\n")
            write_step(path / ROLLOUTS, step, records_of(step, completions, tokens, draw))


def metrics_of(step: int, steps: int, draw: random.Random) -> dict[str, float]:
    names = (
        *("reward/mean", "train/loss", "train/grad_norm", "policy/entropy", "staleness/mean"),
        *("rollout/completion_tokens_mean", "alignment/diff_abs_mean", "grpo/clipped_fraction"),
        *(f"lag_{lag}/{name}" for lag in range(4) for name in ("tokens", "kl_k1", "mean_ratio")),
    )
    times = {"train/data_fetch_time": 0.1, "train/compute_time": 0.8, "train/sync_time": 0.1}
    return {
        **{"step": step, "steps": steps, "train/step_time": 1.0, "throughput/tokens_per_s": 1e4},
        **times,
        **{name: draw.random() for name in names},
    }


def records_of(
    step: int, completions: int, tokens: int, draw: random.Random
) -> Iterator[RolloutRecord]:
    for number in range(completions):
        logprobs = [round(-draw.random(), 7) for _ in range(tokens)]
        yield RolloutRecord(
            step=step,
            group=number // GROUP,
            index=number % GROUP,
            env_id=0,
            task="sums",
            item=f"{number:08x}",
            messages=[
                {"role": "user", "content": "What is 17 + 25?"},
                {"role": "assistant", "content": "42 " * (tokens // 2)},
            ],
            tokens=[draw.randrange(49_152) for _ in range(20 + tokens)],
            mask=[0] * 20 + [1] * tokens,
            behaviour_logprobs=logprobs,
            logprobs=logprobs,
            score=draw.random(),
            parts={},
            reason=None,
            advantage=0.1,
            versions=[[0, step - 1], [0, step - 1]],
            staleness=0,
            finish_reason="stop",
            temperature=1.0,
            completion_tokens=tokens,
        )


def measure(run: Path, steps: int, repeats: int) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    page = PageServer(live_runs([run]), "127.0.0.1", 0)
    with (
        page.in_a_thread(),
        httpx.Client(base_url=page.url, trust_env=False, timeout=120) as client,
    ):
        id = client_time(client, "api/runs", "the runs, before one is looked at", repeats)[0]["id"]
        at = f"api/runs/{id}"
        client_time(client, f"{at}/curves?x=step&points=1000", "first curves, all steps read", 1)
        for axis in ("step", "time"):
            client_time(client, f"{at}/curves?x={axis}&points=1000", f"curves by {axis}", repeats)
        client_time(client, f"{at}/steps", "the steps that have rollouts", repeats)
        client_time(client, f"{at}/steps/{steps // 2}", "rollouts of a step", repeats)
        used = (process.memory_info().rss - before) / MIB
        tell(f"memory of the service: {used:.0f} MiB more than before")


def client_time(client: httpx.Client, path: str, title: str, repeats: int) -> list[dict[str, str]]:
    took = []
    for _ in range(repeats):
        time.sleep(0.6)  # the service looks at the run again
        started = time.monotonic()
        with client.stream("GET", path) as answer:
            size = sum(len(part) for part in answer.iter_raw())
            answer.raise_for_status()
        took.append(time.monotonic() - started)
    milliseconds = 1000 * statistics.median(took)
    tell(f"{title:<42} {milliseconds:8.0f} ms {size / 1000:9.1f} kB")
    found: list[dict[str, str]] = client.get(path).json()
    return found


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
