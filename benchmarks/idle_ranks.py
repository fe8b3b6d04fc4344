"""How long trainer processes (ranks) wait for each other in a step, with the lengths of GSM8K:

    python -m benchmarks.idle_ranks --data DIRECTORY

Each micro-batch is computed once per round by one thread, whose CPU time counts. The share of idle
time follows from these seconds, and beside it from the operations, as the trainer records it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.report import publish_table, today
from benchmarks.train_bench.our_side import scored
from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import ForwardOptions
from grpo_trainer.advantages import with_advantages
from grpo_trainer.data.collate import Batch, collate
from grpo_trainer.data.cuts import Cut
from grpo_trainer.data.groups import GroupLimits, UsableSequence, sequences_of
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.forward import FastForward, build_forward_pass
from grpo_trainer.telemetry.speed import ModelFlops, idle_fraction

SECTION = "idle ranks"
RANKS, GROUP_SIZE, BUDGET, SEQ_LEN, ROUNDS = (2, 4, 8), 8, 4096, 2048, 3
CHARACTERS = 4
"""Of a token, about."""
VOCABULARY = 1000
WORKS = {f"{8 * groups} sequences": groups for groups in (8, 16)}


def sequences(data: Path, groups: int) -> list[UsableSequence]:
    """Questions of GSM8K, and for each 8 completions of random tokens, as long as some answers."""
    draw = random.Random(0)
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]

    def tokens(text: str) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(len(text) // CHARACTERS)]

    found = []
    for row in draw.sample(rows, groups):
        prompt = tokens(row["question"])
        completions = [tokens(other["answer"]) for other in draw.sample(rows, GROUP_SIZE)]
        found.append(
            scored([(prompt, c, [-1.0] * len(c), i % 2) for i, c in enumerate(completions)])
        )
    return sequences_of(found, GroupLimits(VOCABULARY, SEQ_LEN))


@dataclass(frozen=True)
class Trainee:
    policy: Any
    forward: FastForward
    flops: ModelFlops

    @classmethod
    def small(cls) -> Trainee:
        sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
        torch.manual_seed(0)
        policy: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads)).eval()
        return cls(policy, build_forward_pass(policy, ForwardOptions()), ModelFlops.of(policy))

    def seconds(self, batch: Batch) -> list[float]:
        """Of each micro-batch."""
        return [
            median(self._seconds(replace(batch, micro_batches=[m])) for _ in range(ROUNDS))
            for m in batch.micro_batches
        ]

    def _seconds(self, batch: Batch) -> float:
        began = time.thread_time()
        accumulate_gradients(self.policy, batch, GRPO, 0, self.forward)
        return time.thread_time() - began

    def costs(self, found: Sequence[UsableSequence], cut: Cut) -> tuple[list[float], list[float]]:
        """Seconds and operations of each micro-batch."""
        batch = with_advantages(collate(found, SEQ_LEN, BUDGET, cut, GRPO), GRPO)
        return self.seconds(batch), [*map(self.flops.of_micro_batch, batch.micro_batches)]


def rows(trainee: Trainee, data: Path) -> Iterator[list[str]]:
    cut = trainee.forward.layout.cut
    view = trainee.flops.of_view / trainee.flops.of_token
    yield ["", *(f"{ranks} ranks" for ranks in RANKS)]
    for name, groups in WORKS.items():
        found = sequences(data, groups)
        whole = trainee.costs(found, cut)
        dealt = [trainee.costs(found, replace(cut, ranks=ranks, view=view)) for ranks in RANKS]
        yield [f"{name}, divided for one rank", *map(idle, [whole] * len(RANKS), RANKS)]
        yield [f"{name}, divided for the ranks", *map(idle, dealt, RANKS)]


def idle(costs: tuple[list[float], list[float]], ranks: int) -> str:
    return "{:.1f} % ({:.1f} %)".format(*(100 * idle_fraction(one, ranks) for one in costs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="directory with GSM8K's train.jsonl"
    )
    parser.add_argument("--results", type=Path, help="Markdown file whose section is replaced")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = (
        f"`python -m benchmarks.idle_ranks --data DIRECTORY` on {today()}: the share of the ranks' "
        "time in which they wait for the costliest micro-batch of each round, of at most "
        f"{BUDGET:,} tokens. By "
        f"the CPU seconds of each micro-batch (median of {ROUNDS}), and in brackets by its "
        "operations, as `train/rank_idle_fraction`. Questions of GSM8K, 8 completions each, as "
        "long as answers; a model of 2 layers, 128 wide."
    )
    publish_table(SECTION, about, [*rows(Trainee.small(), options.data)], options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
