"""Our trainer's step on one batch: `python -m benchmarks.train_bench.our_side FILE`, as JSON."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.train_bench.timed_steps import PeakMemory
from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import ForwardOptions
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.advantages import with_advantages
from grpo_trainer.data.collate import Batch, collate
from grpo_trainer.data.cuts import Cut
from grpo_trainer.data.groups import GroupLimits, common_prefix, sequences_of
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.forward import build_forward_pass
from grpo_trainer.optim.master_optimizer import MasterOptimizer


def batch_of(work: dict[str, Any], vocabulary: int, cut: Cut) -> Batch:
    size = work["group_size"]
    names = ("prompts", "completions", "logprobs", "scores")
    rows = list(zip(*(work[name] for name in names), strict=True))
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    limits = GroupLimits(vocabulary, seq_len=10_000)
    sequences = sequences_of(map(scored, groups), limits)
    batch = collate(sequences, 10_000, work["tokens_per_micro_batch"], cut, GRPO)
    return with_advantages(batch, GRPO)


def scored(group: list[tuple[list[int], list[int], list[float], float]]) -> ScoredGroup:
    return ScoredGroup(
        tokens=[prompt + completion for prompt, completion, _, _ in group],
        masks=[[MASKED] * len(prompt) + completion for prompt, completion, _, _ in group],
        scores=[score for _, _, _, score in group],
        inference_logprobs=[
            [PROMPT_LOGPROB] * len(prompt) + logprobs for prompt, _, logprobs, _ in group
        ],
    )


def measure(work: dict[str, Any]) -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).eval()
    memory = PeakMemory(model)
    forward = build_forward_pass(model, ForwardOptions())
    batch = batch_of(work, model.config.vocab_size, forward.layout.cut)
    optimizer = MasterOptimizer(model.parameters(), lambda _: 1e-6, 0.01, 1.0)
    losses, norms, seconds = [], [], []
    for step in range(work["steps"]):
        began = time.perf_counter()
        stats = accumulate_gradients(model, batch, GRPO, step, forward)
        norms.append(optimizer.step(step))
        optimizer.write_into_parameters()
        seconds.append(time.perf_counter() - began)
        losses.append(stats.loss)
    peak = memory.bytes()
    by_onednn = (torch.ops.grpo.linear, torch.ops.mkldnn._linear_pointwise)
    uncounted = {torch.ops.aten.addmm_: addmm_flops, **dict.fromkeys(by_onednn, linear_flops)}
    with FlopCounterMode(display=False, custom_mapping=uncounted) as flops:
        accumulate_gradients(model, batch, GRPO, 0, forward)
    return {
        "loss": losses[0],
        "norm": norms[0],
        "step_s": statistics.median(seconds[1:]),
        "peak_bytes": peak,
        "flops": flops.get_total_flops(),
        "least_flops": 6 * distinct_tokens(work) * model.num_parameters(),
    }


def addmm_flops(_: Any, left: tuple[int, int], right: tuple[int, int], **__: Any) -> int:
    """Args: left, right: the factors' shapes"""
    return 2 * left[0] * left[1] * right[1]


def linear_flops(inputs: tuple[int, ...], weight: tuple[int, int], *_: Any, **__: Any) -> int:
    """Args: inputs, weight: the factors' shapes; the weight is transposed"""
    return 2 * math.prod(inputs) * weight[0]


def distinct_tokens(work: dict[str, Any]) -> int:
    """Tokens that predict another one, each common beginning counted once."""
    joined = zip(work["prompts"], work["completions"], strict=True)
    rows = sorted((prompt + completion)[:-1] for prompt, completion in joined)
    shared = sum(common_prefix(a, b) for a, b in pairwise(rows))
    return sum(map(len, rows)) - shared


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(work["threads"])
    sys.stdout.write(json.dumps(measure(work)) + "\n")


if __name__ == "__main__":
    main()
