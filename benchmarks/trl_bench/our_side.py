"""Our trainer's step on one batch: `python -m benchmarks.trl_bench.our_side FILE`, as JSON."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.algo.accumulate import accumulate_gradients
from grpo_trainer.config.forward import ForwardOptions
from grpo_trainer.data.collate import Batch, collate
from grpo_trainer.data.group_checks import GroupLimits, usable_group
from grpo_trainer.data.micro_batches import Cut
from grpo_trainer.model.forward import build_forward_pass
from grpo_trainer.optim.master_optimizer import MasterOptimizer

CLIP_EPS = 0.2


def batch_of(work: dict[str, Any], vocabulary: int, cut: Cut) -> Batch:
    size = work["group_size"]
    rows = list(zip(work["prompts"], work["completions"], work["scores"], strict=True))
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    limits = GroupLimits(vocabulary, seq_len=10_000)
    usable = [
        usable_group(i, scored(group, work["logprob"]), limits) for i, group in enumerate(groups)
    ]
    return collate(usable, 10_000, work["tokens_per_micro_batch"], cut)


def scored(group: list[tuple[list[int], list[int], float]], logprob: float) -> ScoredGroup:
    return ScoredGroup(
        tokens=[prompt + completion for prompt, completion, _ in group],
        masks=[[MASKED] * len(prompt) + completion for prompt, completion, _ in group],
        scores=[score for _, _, score in group],
        inference_logprobs=[
            [PROMPT_LOGPROB] * len(prompt) + [logprob] * len(completion)
            for prompt, completion, _ in group
        ],
    )


def measure(work: dict[str, Any]) -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).eval()
    forward = build_forward_pass(model, ForwardOptions())
    batch = batch_of(work, model.config.vocab_size, forward.layout.cut)
    optimizer = MasterOptimizer(model.parameters(), 1e-6, 0, 0.01, 1.0)
    before = peak_bytes()
    losses, seconds = [], []
    for step in range(work["steps"]):
        began = time.perf_counter()
        stats = accumulate_gradients(model, batch, CLIP_EPS, step, forward)
        optimizer.step(step)
        optimizer.write_into_parameters()
        seconds.append(time.perf_counter() - began)
        losses.append(stats.loss)
    return {
        "loss": losses[0],
        "step_s": statistics.median(seconds[1:]),
        "peak_bytes": peak_bytes() - before,
        "advantages": advantages(batch),
    }


def advantages(batch: Batch) -> list[float]:
    return [a for micro in batch.micro_batches for a in micro.advantages.tolist()]


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(work["threads"])
    sys.stdout.write(json.dumps(measure(work)) + "\n")


if __name__ == "__main__":
    main()
