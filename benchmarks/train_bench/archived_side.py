"""A step in the archived trainer's way: `python -m benchmarks.train_bench.archived_side FILE`.

What its documents and its messages tell: rows padded to a multiple of 64 tokens, all logits in
float32, the importance ratio to the policy itself, AdamW of torch. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.train_bench.timed_steps import timed_steps

MULTIPLE = 64
NO_TARGET = -100


def micro_batches(work: dict[str, Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens [B, T], targets [B, T] and advantages [B], in the order of the batch."""
    rows = list(zip(work["prompts"], work["completions"], work["advantages"], strict=True))
    longest = max(len(prompt) + len(completion) for prompt, completion, _ in rows) - 1
    width = -(-longest // MULTIPLE) * MULTIPLE
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), NO_TARGET)
    for i, (prompt, completion, _) in enumerate(rows):
        sequence = torch.tensor(prompt + completion)
        tokens[i, : len(sequence) - 1] = sequence[:-1]
        targets[i, len(prompt) - 1 : len(sequence) - 1] = sequence[len(prompt) :]
    advantages = torch.tensor([advantage for _, _, advantage in rows])
    columns = (tokens, targets, advantages)
    return list(zip(*(torch.split(c, work["micro_batch"]) for c in columns), strict=True))


def loss_of(logits: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """Mean over the sequences of the mean over the tokens."""
    logp = -functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=NO_TARGET
    ).view(targets.shape)
    mask = (targets != NO_TARGET).float()
    ratio = (logp - logp.detach()).exp()
    return ((-ratio * mask).sum(-1) / mask.sum(-1) * advantages).mean()


def measure(work: dict[str, Any]) -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).train()
    parts = micro_batches(work)

    def loss(tokens: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
        logits = model(tokens).logits / 1.0  # the temperature
        return loss_of(logits, targets, advantages) / len(parts)

    return timed_steps(model, [partial(loss, *part) for part in parts], work["steps"])


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(work["threads"])
    sys.stdout.write(json.dumps(measure(work)) + "\n")


if __name__ == "__main__":
    main()
