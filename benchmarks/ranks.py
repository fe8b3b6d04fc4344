"""Seconds per step with one trainer process (rank) and with two:

    python -m benchmarks.ranks --data DIRECTORY

Each rank computes with one thread. Runs with one and with two ranks take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.idle_ranks import GROUP_SIZE, SEQ_LEN, VOCABULARY, sequences
from benchmarks.report import publish_table, spread, today
from grpo_core.tree.objectives import GRPO
from grpo_core.tree.optim import ProcessOptions
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.advantages import with_advantages
from grpo_trainer.data.collate import collate
from grpo_trainer.learner import build_learner
from grpo_trainer.ranks import process_group

SECTION = "two ranks"
RANKS, GROUPS, STEPS, TOKENS = (1, 2), 8, 3, 2048
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


def measure(rank: int, count: int, meeting: str, data: Path, found: Any) -> None:
    """Put the seconds of each step, and the CPU seconds of this rank in it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {"world_size": count, "trainer_rank": rank, "init_method": meeting}
    with process_group(ProcessOptions(**options)) as ranks:
        given = {"model": "m", "mode": "none", "lr": 1e-6, "world_size": count}
        settings = CommandLine.model_validate(given | {"rank_deadline_s": 1e4}).settings()
        policy: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **SIZES, **HEADS)).eval()
        learner = build_learner(policy, settings, ranks)
        cut = learner.forward.layout.cut
        batch = collate(sequences(data, GROUPS), SEQ_LEN, TOKENS, cut, GRPO)
        batch = with_advantages(batch, GRPO, ranks)
        for step in range(1 + STEPS):
            began, used = time.perf_counter(), time.process_time()
            learner.accumulate_once(batch, GRPO, step)
            learner.optimizer.step(step)
            learner.optimizer.write_into_parameters()
            if step:
                found.put((step, time.perf_counter() - began, time.process_time() - used))


def run(count: int, data: Path, directory: Path) -> tuple[float, float]:
    """Median seconds of a step, and CPU seconds of the rank that used the most."""
    context = multiprocessing.get_context("spawn")
    found, meeting = context.Queue(), (directory / f"{time.time_ns()}").as_uri()
    workers = [
        context.Process(target=measure, args=(rank, count, meeting, data, found))
        for rank in range(count)
    ]
    for worker in workers:
        worker.start()
    rows = [found.get(timeout=600) for _ in range(count * STEPS)]
    for worker in workers:
        worker.join()
    return median(row[1] for row in rows), median(
        max(cpu for step, _, cpu in rows if step == number) for number in range(1, 1 + STEPS)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="directory with GSM8K's train.jsonl"
    )
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--results", type=Path, help="Markdown file whose section is replaced")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        pairs = [
            [run(count, options.data, Path(directory)) for count in RANKS]
            for _ in range(options.rounds)
        ]
    (walls, cpus) = ([[pair[i][k] for pair in pairs] for i in range(2)] for k in range(2))
    gain = [f"{median(one) / median(two):.2f}x" for one, two in (walls, cpus)]
    rows = [
        ["", "1 rank", "2 ranks", "gain", "ideal"],
        ["seconds of a step", *map(spread, walls), gain[0], "2x"],
        ["CPU seconds of the busiest rank", *map(spread, cpus), gain[1], "2x"],
    ]
    about = (
        f"`python -m benchmarks.ranks --data DIRECTORY` on {today()}: a step on "
        f"{GROUPS * GROUP_SIZE} sequences with gloo, one thread for each rank, at most {TOKENS:,} "
        f"tokens in a micro-batch; a model of 4 layers, 256 wide. {len(pairs)} pairs of runs of "
        f"{STEPS} steps: median (lowest to highest)."
    )
    publish_table(SECTION, about, rows, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
