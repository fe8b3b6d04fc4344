"""All that is known of one step, in numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from grpo_core.wire import PolicyVersion
from grpo_trainer.alignment import Alignment
from grpo_trainer.batch_facts import BatchFacts
from grpo_trainer.gradients import GradientStats
from grpo_trainer.intake import Intake
from grpo_trainer.loss import NO_SUMS
from grpo_trainer.metrics import StepOutcome, StepTimes
from grpo_trainer.token_table import Distance, TokenTable
from grpo_trainer.weight_sync.base import Published

SUMS = replace(
    NO_SUMS,
    **{"tokens": 4, "ratio": 4.4, "ratio_square": 5.0, "ratio_max": 1.4, "clipped": 1},
    **{"logp": -4.0, "logp_square": 7.0, "behaviour_logp": -6.0, "behaviour_logp_square": 12.0},
    **{"diff": 2.0, "diff_abs": 2.4, "diff_max": 1.1, "kl_k3": 0.4},
    **{"positive_tokens": 1, "positive_logp": -0.5, "negative_tokens": 2, "negative_logp": -3.0},
)
FACTS = BatchFacts(
    tokens=100,
    reward_mean=0.25,
    reward_std_in_group=0.5,
    zero_variance_fraction=0.1,
    truncated_fraction=0.2,
    completion_tokens_mean=12.5,
    first_versions=[PolicyVersion(3, 7)],
    version_bounds=[],
    bound_fraction=0.0,
    generation_s=0.3,
)


def table(diff: list[float]) -> TokenTable:
    zeros = torch.zeros(len(diff))
    return TokenTable(torch.tensor(diff), zeros, zeros + 1, zeros.long(), zeros.long())


OUTCOME = StepOutcome(
    step=7,
    steps=10,
    lr=1e-4,
    intake=Intake([], unusable_groups=3, repeated_groups=1, stale_groups=2),
    facts=FACTS,
    gradients=GradientStats(0.5, SUMS, table([0.1, -1.1, 0.4, 0.8])),
    fresh=Distance(tokens=2, mean=0.01, max=0.02, surely=0.0),
    published=Published(PolicyVersion(3, 8), 1.5, 0.1, 0.2),
    alignment=Alignment(mean=1e-6, max=2e-6, moved=0.01, sampled_mean=3e-6),
    times=StepTimes(fetch_s=0.5, compute_s=1.0, sync_s=0.2, step_s=2.0, time_s=9.0),
    save_s=0.25,
)
