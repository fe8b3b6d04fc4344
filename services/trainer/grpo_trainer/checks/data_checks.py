"""All checks of a batch between sampling and update, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.evidence import Movement
from grpo_trainer.checks.findings import CheckName, Finding, FindingLog
from grpo_trainer.checks.groups import GroupCheck
from grpo_trainer.checks.rollouts import RolloutCheck, ServedLogprobs, fresh_tokens
from grpo_trainer.checks.sampling import RatioCheck, SamplingCheck, UnfilteredGroups
from grpo_trainer.data.collate import Batch
from grpo_trainer.learner import Learner
from grpo_trainer.model.logprobs import logprobs_of, probe_tokens, tolerance_of
from grpo_trainer.model.policy import end_tokens_of, vocabulary_of
from grpo_trainer.model.reference import Reference
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.token_table import Distance, TokenTable, mean_distance

MAX_UNCHANGED = 0.5
"""Share of the weights with a gradient that a step may leave as they were."""

EVERY_STEPS = 4
PROBE_TOKENS = 16


class DataChecks:
    """Args:
    served_logprobs: asks the server
    tolerance: for the mean |difference| of fresh tokens

    `failed`: number of findings since the previous step.
    """

    def __init__(self, learner: Learner, served_logprobs: ServedLogprobs, tolerance: float) -> None:
        policy, reference = learner.policy, learner.reference
        uses_scores = learner.settings.resolved_objective.reward_coef > 0
        self._groups = GroupCheck(end_tokens_of(policy), uses_scores)
        self._ratios, self._sampling = RatioCheck(), SamplingCheck()
        self._unfiltered = UnfilteredGroups()
        self._movement = Movement(policy)
        self._reference = None if reference is None else ReferenceCheck(reference)
        self._rollouts = RolloutCheck(policy, served_logprobs, tolerance, self._movement)
        self._log = FindingLog()
        self._batches = self.failed = 0

    def before_update(
        self,
        batch: Batch,
        table: TokenTable,
        held: PolicyVersion,
    ) -> Distance:
        """Returns the distance of the fresh tokens' logprobs.

        Args:
            table: the batch's trained tokens, with logprobs of the weights that `held` names

        Raises:
            RolloutMismatch: the error of `RolloutCheck`.
        """
        self._batches += 1
        self._movement.remember(batch, table, held)
        sampled = [*self._of_sampling(batch, table, held)]
        self.failed = self._log.report(
            [
                *self._groups.findings(batch.sequences, held),
                *sampled,
                *(() if self._reference is None else self._reference.findings(held.step)),
            ],
            held.step,
        )
        doubted = {one.env_id for one in sampled if one.check is CheckName.IMPORTANCE_RATIO}
        of_rollouts = self._rollouts.findings(batch, table, held, doubted)
        self.failed += self._log.report(of_rollouts, held.step)
        self._log.abstained[CheckName.TEMPERATURE] += self._rollouts.is_moot
        return Distance.of(table.where(fresh_tokens(table, batch, held)))

    def _of_sampling(
        self, batch: Batch, table: TokenTable, held: PolicyVersion
    ) -> Iterator[Finding]:
        flags = zip(batch.sequences, self._unfiltered.of(batch), strict=True)
        table = table.where(table.of_sequences(s.is_logged and is_free for s, is_free in flags))
        ratios, ends = self._ratios, self._sampling
        ratios.evidence.is_moot = ends.evidence.is_moot = False
        env_ids = [sequence.group.env_id for sequence in batch.sequences]
        for env_id in dict.fromkeys(env_ids):
            mine = table.where(table.of_sequences(other == env_id for other in env_ids))
            moved = partial(self._movement.total_variation, env_id, batch)
            yield from ratios.findings(mine, env_id, moved)
            yield from ends.findings(mine, env_id, held.step, moved)
        self._log.abstained[CheckName.IMPORTANCE_RATIO] += ratios.evidence.is_moot
        self._log.abstained[CheckName.TRUNCATED_SAMPLING] += ends.evidence.is_moot

    def report_abstentions(self) -> None:
        """At the end of a run."""
        self._log.report_abstentions(self._batches)

    def after_update(self, optimizer: MasterOptimizer, step: int) -> None:
        unchanged = optimizer.unchanged_fraction()
        if unchanged > MAX_UNCHANGED:
            lost = Finding(
                CheckName.LOST_UPDATE,
                None,
                f"the updates of {100 * unchanged:.0f} % of the weights were rounded away",
                "pass --master-dtype float32, or --rounding stochastic, or raise --lr",
            )
            self.failed += self._log.report([lost], step)


class ReferenceCheck:
    """Create it before the first update: it remembers the reference model's logprobs of fixed
    tokens."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        vocabulary = vocabulary_of(reference.model)
        self._tokens = probe_tokens(vocabulary, PROBE_TOKENS)
        self._first = self._logprobs()
        self._tolerance = tolerance_of(reference.model)

    def findings(self, step: int) -> Iterator[Finding]:
        if step % EVERY_STEPS:
            return
        moved = mean_distance(self._logprobs(), self._first)
        if moved > self._tolerance:
            yield Finding(
                CheckName.REFERENCE_MOVED,
                None,
                f"the reference model's logprobs of {PROBE_TOKENS} fixed tokens changed by "
                f"{moved:.2g} on average, so the KL penalty does not hold the policy near --model",
                "the reference model must share no trained weights with the policy: in the LoRA "
                "modes, check that only the adapter is trained",
            )

    def _logprobs(self) -> Tensor:
        with self._reference.active():
            return logprobs_of(self._reference.model, self._tokens)
