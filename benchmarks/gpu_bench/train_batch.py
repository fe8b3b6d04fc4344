"""Batches of random completions, made as the trainer makes them of what environments send."""

from __future__ import annotations

import math
import random

from benchmarks.gpu_bench.counts import evenly_spread
from benchmarks.gpu_bench.settings import TrainWork
from benchmarks.gpu_bench.shapes import ModelShape
from grpo_core.wire import MASKED, PROMPT_LOGPROB, ScoredGroup
from grpo_trainer.data.collate import Batch, CollationLimits, collate
from grpo_trainer.data.group_checks import GroupLimits, usable_group

PROMPT_SHARE = 8
"""One in so many tokens of the shortest sequence is the prompt's, in all of them."""


def random_batch(shape: ModelShape, work: TrainWork, seed: int) -> Batch:
    """One group: a prompt, and completions that make sequences of the work's lengths. They are as
    likely as a policy of random weights finds them."""
    generator = random.Random(seed)
    lengths = evenly_spread(work.shortest, work.longest, work.sequences)
    generator.shuffle(lengths)
    vocabulary = range(shape.vocabulary)
    prompt = generator.choices(vocabulary, k=max(1, work.shortest // PROMPT_SHARE))
    completions = [generator.choices(vocabulary, k=n - len(prompt)) for n in lengths]
    likelihood = -math.log(shape.vocabulary)
    group = ScoredGroup(
        tokens=[prompt + completion for completion in completions],
        masks=[[MASKED] * len(prompt) + completion for completion in completions],
        scores=[float(i % 2) for i in range(len(completions))],
        inference_logprobs=[
            [PROMPT_LOGPROB] * len(prompt) + [likelihood] * len(completion)
            for completion in completions
        ],
    )
    usable = usable_group(0, group, GroupLimits(shape.vocabulary, work.longest))
    return collate([usable], CollationLimits(work.longest, work.micro_batch))


def trained_lengths(batch: Batch) -> list[int]:
    """Positions of each sequence that go through the model, padding left out."""
    return [length for micro in batch.micro_batches for length in micro.lengths]
