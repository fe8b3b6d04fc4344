"""All checks of a batch between sampling and update, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.findings import CheckName, Finding, FindingLog
from grpo_trainer.checks.groups import GroupCheck
from grpo_trainer.checks.rollouts import RatioCheck, RolloutCheck, UnlikelyRatio
from grpo_trainer.checks.sampling import ReferenceCheck, SamplingCheck
from grpo_trainer.checks.served_weights import ServedLogprobs
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.groups import UsableGroup
from grpo_trainer.model.forward import FastForward
from grpo_trainer.model.policy import CausalLM, end_tokens_of
from grpo_trainer.model.reference import Reference
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.token_table import Distance, TokenTable

MAX_UNCHANGED = 0.5
"""Share of the weights with a gradient that a step may leave as they were."""


@dataclass
class DataChecks:
    """Args: reference: None without a reference model

    `failed`: number of findings since the previous step.
    """

    groups: GroupCheck
    ratios: RatioCheck
    sampling: SamplingCheck
    reference: ReferenceCheck | None
    rollouts: RolloutCheck
    log: FindingLog = field(default_factory=FindingLog)
    failed: int = 0

    @classmethod
    def of(
        cls,
        policy: CausalLM,
        forward: FastForward,
        reference: Reference | None,
        served_logprobs: ServedLogprobs,
        tolerance: float,
    ) -> Self:
        """Those of a run. Args: tolerance: for the mean |difference| of fresh tokens"""
        return cls(
            GroupCheck(end_tokens_of(policy)),
            RatioCheck(),
            SamplingCheck(policy, forward),
            None if reference is None else ReferenceCheck(reference),
            RolloutCheck(policy, served_logprobs, tolerance),
        )

    def before_update(
        self,
        batch: Batch,
        groups: Sequence[UsableGroup],
        table: TokenTable,
        held: PolicyVersion,
    ) -> Distance:
        """Returns the distance of the fresh tokens' logprobs.

        Args:
            groups: of `batch`
            table: its trained tokens, with logprobs of the weights that `held` names

        Raises:
            RolloutMismatch: the error of `RolloutCheck`.
        """
        logged_groups = [usable.is_logged for usable in groups]
        of_sequence = torch.tensor([logged_groups[origin.group] for origin in batch.origins])
        is_logged, env_ids = of_sequence[table.sequence], [o.env_id for o in batch.origins]
        unlikely = self.ratios.unlikely(table.where(is_logged), env_ids)
        self.failed = self.log.report(
            [
                *self.groups.findings(groups, held),
                *map(_of_ratio, unlikely),
                *self.sampling.findings(table, is_logged, batch, held),
                *(() if self.reference is None else self.reference.findings(held.step)),
            ],
            held.step,
        )
        doubted = {one.env_id for one in unlikely}
        fresh = self.rollouts.require_match(batch, table, held, doubted)
        self.failed += self.log.report(self.rollouts.findings, held.step)
        return fresh

    def after_update(self, optimizer: MasterOptimizer, step: int) -> None:
        self.failed += self.log.report(_of_update(optimizer), step)


def _of_ratio(one: UnlikelyRatio) -> Finding:
    return Finding(
        CheckName.IMPORTANCE_RATIO,
        one.env_id,
        f"{one}. For sampled tokens with their own logprobs it is 1, however old they are",
        "check that inference_logprobs are those of the sampled tokens, at the temperature that "
        "the group states, and that prompt, tokens and masks are those of the server's response",
    )


def _of_update(optimizer: MasterOptimizer) -> Iterator[Finding]:
    unchanged = optimizer.unchanged_fraction()
    if unchanged > MAX_UNCHANGED:
        yield Finding(
            CheckName.LOST_UPDATE,
            None,
            f"the step left {100 * unchanged:.0f} % of the weights with a gradient as they were: "
            "their updates were rounded away",
            "pass --master-dtype float32, or --rounding stochastic, or raise --lr",
        )
