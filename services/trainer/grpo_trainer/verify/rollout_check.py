"""Checks that completions were sampled by the weights and the temperature of their group.

Fresh completions were sampled by exactly the trainer's weights, so both sides' logprobs must agree
to rounding noise. Misplaced logprobs, a wrong temperature, trained prompt tokens or other weights
on the server break this. The check finds them before the batch's update. The mean over a batch
hides a single wrong token, so each fresh token is also checked alone (`single_tokens`).

For older completions a difference alone proves nothing, because the policy has moved. They end the
run only if one hypothesis explains the difference: nearly all of it in one batch, or most of it in
two batches in a row.

Completions of one prompt are sampled independently, so a long common beginning is improbable under
the policy. If it is too improbable, it must be a prompt among the trained tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_core.errors import GrpoError
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.algo.logprob_comparison import Distance, TokenTable
from grpo_trainer.data.collate import Batch, Origin
from grpo_trainer.errors import RolloutMismatch
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.verify.alignment import MISMATCH, ServedLogprobs
from grpo_trainer.verify.causes import (
    UNCHANGED,
    Cause,
    Hypothesis,
    ServerAnswer,
    mismatch_report,
    recomputed,
    rounded_logprobs,
    scaled_logprobs,
    shifted_logprobs,
    without_shared_prefix,
)
from grpo_trainer.verify.findings import CheckName, Finding
from grpo_trainer.verify.recomputed import subsample
from grpo_trainer.verify.single_tokens import single_tokens

LOOK_EVERY_STEPS = 8
"""Older completions without any doubt are examined at every eighth step, because this needs another
forward pass."""
SUSPICIOUS = 0.05
"""Minimum mean |difference| at which older completions are examined."""
FAR_BETTER = 4.0
"""A hypothesis is believed without fresh completions if it reduces the difference by this factor in
two batches in a row."""
BETTER = 1.1
"""Another temperature that reduces the difference by this factor in two checks in a row is
reported."""
DECISIVE = 16.0
"""The factor at which one batch is enough."""
PROOF_TOKENS = 16
"""This many correct fresh tokens clear the environment's other completions in the same batch."""
SERVER_SAMPLE_SEQUENCES = 4
CHANCE_NATS = 30.0
"""The limit of improbability: exp(-30) is 1e-13."""
DRIFT_NATS = 0.2
"""Allowed loss of a token's logprob since it was sampled. Without it, small losses would add up
over a long and nearly certain beginning."""
MAX_SIBLINGS = 7
"""Siblings that count. More would only multiply the errors of the policy's logprobs."""


@dataclass(frozen=True)
class RolloutCheck:
    """Args:
    policy: the trainer's, for hypotheses that need another forward pass
    served_logprobs: returns the server's logprobs; called only if a check fails
    tolerance: for the mean |difference| of fresh completions, given the data type
    """

    policy: CausalLM
    served_logprobs: ServedLogprobs
    tolerance: float
    findings: list[Finding] = field(init=False, default_factory=list)
    """Of the last batch."""
    _suspected: set[int | None] = field(init=False, default_factory=set)
    _tempered: set[int | None] = field(init=False, default_factory=set)

    def require_match(
        self,
        batch: Batch,
        table: TokenTable,
        version: PolicyVersion,
        doubted: Container[int | None] = (),
    ) -> Distance:
        """Check a batch, one environment at a time; returns the distance of its fresh tokens.

        Args:
            table: the batch's trained tokens, with logprobs of the weights that `version` names
            doubted: environments whose older completions another check found unlikely

        Raises:
            RolloutMismatch: names the environment, the numbers and the likeliest cause.
        """
        self.findings.clear()
        fresh = _of_sequence(table, (origin.version == version for origin in batch.origins))
        for env_id in dict.fromkeys(origin.env_id for origin in batch.origins):
            mine = _of_sequence(table, (origin.env_id == env_id for origin in batch.origins))
            case = _EnvironmentBatch(version.step, env_id, batch)
            mine_fresh = table.where(mine & fresh)
            self._check_fresh(case, mine_fresh)
            self.findings.extend(single_tokens(env_id, mine_fresh, self.tolerance))
            self._check_shared_prefixes(case, table.where(mine))
            is_doubted = env_id in doubted or env_id in self._suspected | self._tempered
            is_due = is_doubted or version.step % LOOK_EVERY_STEPS == 0
            if is_due and len(mine_fresh) < PROOF_TOKENS:
                self._check_older(case, table.where(mine & ~fresh))
        return Distance.of(table.where(fresh))

    def _check_fresh(self, case: _EnvironmentBatch, fresh: TokenTable) -> None:
        found = Distance.of(fresh)
        if found.lower_bound <= self.tolerance:
            return
        part = subsample(fresh)
        raise RolloutMismatch(
            mismatch_report(
                f"{case}: {found.tokens} trained tokens were sampled by exactly the trainer's "
                f"weights, but their behaviour logprobs differ from the trainer's by "
                f"{found.mean:.2g} on average, {found.max:.2g} at most (tolerance "
                f"{self.tolerance:g}).",
                found,
                sent=part.mean_distance(),
                tried=[
                    *shifted_logprobs(part),
                    *scaled_logprobs(part),
                    *rounded_logprobs(part),
                    *without_shared_prefix(part, case.batch),
                    *recomputed(self.policy, part, case.batch),
                ],
                tolerance=self.tolerance,
                server=self._ask_server(part, case.batch),
            )
        )

    def _check_older(self, case: _EnvironmentBatch, older: TokenTable) -> None:
        found = Distance.of(older)
        if found.lower_bound <= max(SUSPICIOUS, self.tolerance):
            self._suspected.discard(case.env_id)
            self._tempered.discard(case.env_id)
            return
        part = subsample(older)
        sent = part.mean_distance()
        tried = [*shifted_logprobs(part), *recomputed(self.policy, part, case.batch)]
        factor = max((sent / max(h.mean, 1e-9) for h in tried), default=0.0)
        confirmed = factor >= DECISIVE or (factor >= FAR_BETTER and case.env_id in self._suspected)
        if factor >= FAR_BETTER:
            self._suspected.add(case.env_id)
        else:
            self._suspected.discard(case.env_id)
        if not confirmed:
            self._judge_temperature(case, sent, tried)
            return
        summary = (
            f"{case}: the behaviour logprobs of {found.tokens} trained tokens differ from the "
            f"trainer's by {found.mean:.2g} on average, {found.max:.2g} at most. Older or unknown "
            "weights sampled them, so some difference is expected, but one of the following "
            f"assumptions divides the mean difference by {factor:.0f}."
        )
        raise RolloutMismatch(mismatch_report(summary, found, sent, tried, self.tolerance))

    def _judge_temperature(
        self, case: _EnvironmentBatch, sent: float, tried: Sequence[Hypothesis]
    ) -> None:
        """Movement of the policy hides another temperature in part, but it does not look like one:
        in healthy runs the best temperature is within 2 % of the stated one."""
        other = next((h for h in tried if h.cause is Cause.TEMPERATURE), None)
        if other is None or sent < BETTER * other.mean:
            self._tempered.discard(case.env_id)
            return
        if case.env_id in self._tempered:
            self.findings.append(
                Finding(
                    CheckName.TEMPERATURE,
                    case.env_id,
                    f"the logprobs of older completions look as if {other.assumption}: mean "
                    f"|difference| {sent:.2g} as sent, {other.mean:.2g} at that temperature",
                    "let the environment send generation_params.temperature",
                )
            )
        self._tempered.add(case.env_id)

    def _check_shared_prefixes(self, case: _EnvironmentBatch, table: TokenTable) -> None:
        origins = case.batch.origins
        groups = {origin.group for origin in origins if origin.env_id == case.env_id}
        unlikely = groups_with_unlikely_prefix(table, origins)
        if 2 * len(unlikely) > len(groups):
            raise RolloutMismatch(
                f"{MISMATCH} {case}: in {len(unlikely)} of {len(groups)} groups, all completions "
                "begin with the same trained tokens. If the completions were sampled independently "
                "at the stated temperature, the probability of a group with equal tokens is below "
                f"1e-13. Likely cause: {Cause.PROMPT_TRAINED}. Another possible cause: the "
                f"completions were sampled at a far lower temperature than stated. {UNCHANGED}"
            )

    def _ask_server(self, part: TokenTable, batch: Batch) -> ServerAnswer:
        differences = []
        try:
            for number in part.sequences()[:SERVER_SAMPLE_SEQUENCES]:
                length = int(part.position[part.sequence == number].max()) + 1
                differences.append(self._from_server(batch.tokens(number, length)))
        except GrpoError as error:
            return ServerAnswer(None, f"the server did not answer ({error})")
        mean = float(torch.cat(differences).mean())
        return ServerAnswer(mean, f"{mean:.2g}")

    def _from_server(self, tokens: Tensor) -> Tensor:
        """server's - trainer's logprob|, measured now at temperature 1: [T] → [T-1]."""
        ids: list[int] = tokens.tolist()
        ours = logprobs_of(self.policy, ids)
        return (ours - torch.tensor(self.served_logprobs(ids))).abs()


@dataclass(frozen=True)
class _EnvironmentBatch:
    """The part of a batch that one environment sent."""

    step: int
    env_id: int | None
    batch: Batch

    def __str__(self) -> str:
        return f"Step {self.step}, environment {self.env_id}"


def _of_sequence(table: TokenTable, flags: Iterable[bool]) -> Tensor:
    """Expand a flag of each sequence to its tokens: [N] bool."""
    return torch.tensor(list(flags))[table.sequence]


def groups_with_unlikely_prefix(table: TokenTable, origins: Sequence[Origin]) -> set[int]:
    """Groups (by index in the batch) whose common trained tokens have a probability below 1e-13.

    The first completion may begin in any way; each sibling repeats its beginning by chance.

    Args:
        table: trained tokens of any of the batch's sequences
    """
    shared = torch.tensor([origin.shared_tokens for origin in origins])
    begun = table.where(table.position < shared[table.sequence])
    surprise = (begun.logp + DRIFT_NATS).clamp(max=0.0)
    nats: defaultdict[int, float] = defaultdict(float)
    for number, value in zip(begun.sequence.tolist(), surprise.tolist(), strict=True):
        origin = origins[number]
        nats[origin.group] += value / origin.siblings * min(origin.siblings - 1, MAX_SIBLINGS)
    return {group for group, total in nats.items() if total < -CHANCE_NATS}
