"""All checks of a batch between sampling and update, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.findings import CheckName, Finding, FindingLog
from grpo_trainer.checks.groups import GroupCheck
from grpo_trainer.checks.rollouts import RolloutCheck, ServedLogprobs, fresh_tokens
from grpo_trainer.checks.sampling import RatioCheck, SamplingCheck
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
        self._ratios = RatioCheck()
        self._sampling = SamplingCheck(policy, learner.forward)
        self._reference = None if reference is None else ReferenceCheck(reference)
        self._rollouts = RolloutCheck(policy, served_logprobs, tolerance)
        self._log = FindingLog()
        self.failed = 0

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
        is_logged = table.of_sequences(sequence.is_logged for sequence in batch.sequences)
        env_ids = [sequence.group.env_id for sequence in batch.sequences]
        ratios = [*self._ratios.findings(table.where(is_logged), env_ids)]
        self.failed = self._log.report(
            [
                *self._groups.findings(batch.sequences, held),
                *ratios,
                *self._sampling.findings(table, is_logged, batch, held),
                *(() if self._reference is None else self._reference.findings(held.step)),
            ],
            held.step,
        )
        doubted = {finding.env_id for finding in ratios}
        of_rollouts = self._rollouts.findings(batch, table, held, doubted)
        self.failed += self._log.report(of_rollouts, held.step)
        return Distance.of(table.where(fresh_tokens(table, batch, held)))

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
