"""CPU time of the thread that writes rollouts: `python -m benchmarks.environment_bench.recording`.

Prints the CPU time per step in ms as JSON. A step has the demo's size: 16 groups of 8 completions.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from grpo_core.tree.objectives import GRPO
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.advantages import with_advantages
from grpo_trainer.data.collate import collate
from grpo_trainer.data.groups import GroupLimits, Tokens, usable_group
from grpo_trainer.model.logprobs import TokenValues
from grpo_trainer.telemetry.rollouts import RolloutWriter, StepRollouts
from grpo_trainer.token_table import TokenTable

GROUPS, SIZE = 16, 8
PROMPT, COMPLETION = 24, 5
STEPS = 60
VOCABULARY = 512
KEPT = 500


def writer_ms() -> float:
    """Median over blocks of 10 steps."""
    with tempfile.TemporaryDirectory() as directory:
        writer = RolloutWriter(Path(directory), KEPT)
        assert writer._thread.ident is not None
        clock = time.pthread_getcpuclockid(writer._thread.ident)
        taken, before = [], time.clock_gettime(clock)
        for step in range(1, STEPS + 1):
            writer.add(_rollouts(step))
            if step % 10 == 0:
                now = time.clock_gettime(clock)
                taken.append((now - before) / 10 * 1000)
                before = now
        writer.close()
    return median(taken)


def _rollouts(step: int) -> StepRollouts:
    groups = [usable_group(0, _group(), GroupLimits(VOCABULARY, 256, False)) for _ in range(GROUPS)]
    batch = collate(groups, 256, GROUPS * SIZE, _together, GRPO)
    batch = with_advantages(batch, groups, GRPO)
    values = [TokenValues(*[-micro.targets / 700] * 3) for micro in batch.micro_batches]
    tokens = TokenTable.of(batch.micro_batches, values)
    return StepRollouts(step, epoch=1, groups=groups, batch=batch, tokens=tokens)


def _together(sequences: Sequence[Tokens], _size: int) -> list[list[int]]:
    return [[*range(len(sequences))]]


def _group() -> ScoredGroup:
    """As an environment sends it."""
    prompt = [random.randrange(VOCABULARY) for _ in range(PROMPT)]
    said = [[random.randrange(VOCABULARY) for _ in range(COMPLETION)] for _ in range(SIZE)]
    question = [{"role": "user", "content": "What is 3+4?"}, {"role": "assistant", "content": "7"}]
    return ScoredGroup(
        tokens=[prompt + row for row in said],
        masks=[[MASKED] * PROMPT + row for row in said],
        inference_logprobs=[
            [PROMPT_LOGPROB] * PROMPT + [-random.random() for _ in row] for row in said
        ],
        scores=[float(index % 2) for index in range(SIZE)],
        messages=[question] * SIZE,
        overrides=[
            {"reward_parts": {"accuracy": 1.0}, "finish_reason": "stop", "rollout": index}
            for index in range(SIZE)
        ],
        generation_params={"temperature": 1.0, "max_tokens": 8},
        group_overrides={
            "policy_version": [[[1, 3], [1, 3]]] * SIZE,
            "task": "arithmetic",
            "item": "0123456789abcdef",
        },
        env_id=0,
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"writer_ms": writer_ms()}) + "\n")
