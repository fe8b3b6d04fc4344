"""Checks that completions were sampled by the weights and the temperature of their group.

Fresh completions were sampled by exactly the trainer's weights, so both sides' logprobs must agree
to rounding noise. Misplaced logprobs, a wrong temperature, trained prompt tokens or other weights
on the server break this. The check finds them before the batch's update. The mean over a batch
hides a single wrong token, so each fresh token is also checked alone (`single_tokens`).

For older completions a difference alone proves nothing, because the policy has moved. They end the
run only if one hypothesis explains the difference: nearly all of it in one batch, or most of it in
two batches in a row. A policy that becomes more certain looks like another temperature. By the
triangle inequality, no temperature reduces the difference of healthy logprobs by more than the
whole movement of the policy, so one counts only if it does. Without a measured movement, the check
of the temperature abstains.

Completions of one prompt are sampled independently, so a long common beginning is improbable under
the policy. If it is too improbable, it must be a prompt among the trained tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import Tensor

from grpo_core.errors import GrpoError
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.causes import (
    UNCHANGED,
    Cause,
    all_hypotheses,
    mismatch_report,
    recomputed,
    rounded_to_bfloat16,
    shifted_logprobs,
    subsample,
)
from grpo_trainer.checks.evidence import Movement
from grpo_trainer.checks.findings import CheckName, Finding
from grpo_trainer.checks.served_weights import MISMATCH
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.groups import UsableSequence
from grpo_trainer.errors import RolloutMismatch
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.token_table import Distance, TokenTable, mean_distance

LOOK_EVERY_STEPS = 8
"""Older completions without any doubt are examined at every eighth step, because this needs another
forward pass."""
SUSPICIOUS = 0.05
"""Minimum mean |difference| at which older completions are examined."""
FAR_BETTER = 4.0
"""A hypothesis is believed without fresh completions if it reduces the difference by this factor in
two batches in a row."""
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


ServedLogprobs = Callable[[list[int]], list[float]]
"""[T] token ids → [T-1] logprobs of the server at temperature 1."""


class RolloutCheck:
    """Args:
    policy: the trainer's, for hypotheses that need another forward pass
    served_logprobs: called only if a check fails
    tolerance: for the mean |difference| of fresh completions, given the data type
    movement: of the policy

    `is_moot`: another temperature explains some of the last batch's differences, but so may the
    policy's movement.
    """

    def __init__(
        self,
        policy: CausalLM,
        served_logprobs: ServedLogprobs,
        tolerance: float,
        movement: Movement,
    ) -> None:
        self._policy = policy
        self._served_logprobs = served_logprobs
        self._tolerance = tolerance
        self._movement = movement
        self.is_moot = False
        self._suspected: set[int | None] = set()
        self._tempered: set[int | None] = set()

    def findings(
        self,
        batch: Batch,
        table: TokenTable,
        current: PolicyVersion,
        doubted: Container[int | None] = (),
    ) -> Iterator[Finding]:
        """Check a batch, one environment at a time.

        Args:
            table: the batch's trained tokens, with logprobs of the weights that `current` names
            doubted: environments whose older completions another check found unlikely

        Raises:
            RolloutMismatch: names the environment, the numbers and the likeliest cause.
        """
        self.is_moot = False
        is_fresh = fresh_tokens(table, batch, current)
        env_ids = [sequence.group.env_id for sequence in batch.sequences]
        for env_id in dict.fromkeys(env_ids):
            where = f"Step {current.step}, environment {env_id}"
            is_mine = table.of_sequences(other == env_id for other in env_ids)
            fresh = table.where(is_mine & is_fresh)
            self._check_fresh(where, batch, fresh)
            yield from single_tokens(env_id, fresh, self._tolerance)
            unlikely = groups_with_unlikely_prefix(table.where(is_mine), batch.sequences)
            groups = sum(group.env_id == env_id for group in batch.groups)
            self._check_shared_prefixes(where, len(unlikely), groups)
            is_doubted = env_id in doubted or env_id in self._suspected | self._tempered
            is_due = is_doubted or current.step % LOOK_EVERY_STEPS == 0
            if is_due and len(fresh) < PROOF_TOKENS:
                older = table.where(is_mine & ~is_fresh)
                yield from self._check_older(where, env_id, batch, older)

    def _check_fresh(self, where: str, batch: Batch, fresh: TokenTable) -> None:
        found = Distance.of(fresh)
        if found.lower_bound <= self._tolerance:
            return
        part = subsample(fresh)
        summary = (
            f"{where}: {found.tokens} trained tokens were sampled by exactly the trainer's "
            f"weights, but their behaviour logprobs differ from the trainer's by {found.mean:.2g} "
            f"on average, {found.max:.2g} at most (tolerance {self._tolerance:g})."
        )
        sent, tried = part.mean_distance(), [*all_hypotheses(self._policy, part, batch)]
        server = self._ask_server(part, batch)
        raise RolloutMismatch(mismatch_report(summary, found, sent, tried, self._tolerance, server))

    def _check_older(
        self, where: str, env_id: int | None, batch: Batch, older: TokenTable
    ) -> Iterator[Finding]:
        found = Distance.of(older)
        if found.lower_bound <= max(SUSPICIOUS, self._tolerance):
            self._suspected.discard(env_id)
            self._tempered.discard(env_id)
            return
        part = subsample(older)
        sent = part.mean_distance()
        tried = [*shifted_logprobs(part), *recomputed(self._policy, part, batch)]
        other = next((h for h in tried if h.cause is Cause.TEMPERATURE), None)
        if other is not None:
            moved = self._movement.distance(env_id, batch)
            if moved is None or sent - other.mean <= moved:
                self.is_moot = True
                tried.remove(other)
                other = None
        factor = max((sent / max(h.mean, 1e-9) for h in tried), default=0.0)
        if factor >= DECISIVE or (factor >= FAR_BETTER and env_id in self._suspected):
            summary = (
                f"{where}: the behaviour logprobs of {found.tokens} trained tokens differ from the "
                f"trainer's by {found.mean:.2g} on average, {found.max:.2g} at most. Older or "
                "unknown weights sampled them, so some difference is expected, but one of the "
                f"following assumptions divides the mean difference by {factor:.0f}."
            )
            raise RolloutMismatch(mismatch_report(summary, found, sent, tried, self._tolerance))
        self._suspected.discard(env_id)
        if factor >= FAR_BETTER:
            self._suspected.add(env_id)
        was_tempered = env_id in self._tempered
        self._tempered.discard(env_id)
        if other is None:
            return
        self._tempered.add(env_id)
        if was_tempered:
            yield Finding(
                CheckName.TEMPERATURE,
                env_id,
                f"the logprobs of older completions look as if {other.assumption}: mean "
                f"|difference| {sent:.2g} as sent, {other.mean:.2g} at that temperature",
                "let the environment send generation_params.temperature",
            )

    def _check_shared_prefixes(self, where: str, unlikely: int, groups: int) -> None:
        if 2 * unlikely > groups:
            raise RolloutMismatch(
                f"{MISMATCH} {where}: in {unlikely} of {groups} groups, all completions begin with "
                "the same trained tokens. If the completions were sampled independently at the "
                "stated temperature, the probability of a group with equal tokens is below "
                f"1e-13. Likely cause: {Cause.PROMPT_TRAINED}. Another possible cause: the "
                f"completions were sampled at a far lower temperature than stated. {UNCHANGED}"
            )

    def _ask_server(self, part: TokenTable, batch: Batch) -> float | str:
        """Mean |server's - trainer's logprob| of some sequences, measured now at temperature 1; or
        why the server does not answer."""
        ours, served = [], []
        try:
            for number in part.sequences()[:SERVER_SAMPLE_SEQUENCES]:
                length = int(part.position[part.sequence == number].max()) + 1
                ids = batch.sequences[number].tokens[:length]
                ours.append(logprobs_of(self._policy, ids))
                served.append(torch.tensor(self._served_logprobs(ids)))
        except GrpoError as error:
            return f"the server did not answer ({error})"
        return mean_distance(torch.cat(served), torch.cat(ours))


def fresh_tokens(table: TokenTable, batch: Batch, current: PolicyVersion) -> Tensor:
    """[N] bool, which tokens the weights that `current` names sampled."""
    return table.of_sequences(sequence.version == current for sequence in batch.sequences)


def groups_with_unlikely_prefix(table: TokenTable, sequences: Sequence[UsableSequence]) -> set[int]:
    """Groups (by index in the batch) whose common trained tokens have a probability below 1e-13.

    The first completion may begin in any way; each sibling repeats its beginning by chance.

    Args:
        table: trained tokens of any of the batch's sequences
        sequences: all of them, row after row
    """
    shared = torch.tensor([sequence.shared_tokens for sequence in sequences])
    begun = table.where(table.position < shared[table.sequence])
    # What the weights that sampled them gave them, if it was logged: the policy may have moved.
    logged = begun.behaviour_logp.where(begun.behaviour_logp <= 0, begun.logp)
    surprise = (torch.maximum(begun.logp, logged) + DRIFT_NATS).clamp(max=0.0)
    nats: defaultdict[int, float] = defaultdict(float)
    for number, value in zip(begun.sequence.tolist(), surprise.tolist(), strict=True):
        size = sequences[number].group.size
        nats[sequences[number].group_index] += value / size * min(size - 1, MAX_SIBLINGS)
    return {group for group, total in nats.items() if total < -CHANCE_NATS}


SINGLE_TOKEN_FACTOR = 20.0
"""A token whose |difference| exceeds the tolerance by this factor is reported. Healthy maxima are
far below it. Measured with SmolLM2-135M: 2e-5 in float32 (tolerance 2e-4), 0.4 in bfloat16
(tolerance 0.25). A token that was not sampled differs by several nats."""
BFLOAT16_STEP = 2.0**-8
"""Largest relative difference between a number and its rounding to bfloat16."""
_TOKENS = "send the token ids of the server's response, and do not encode text again"
_PRECISION = "let the environment send float32 logprobs: rounding to bfloat16 explains this"


def single_tokens(env_id: int | None, fresh: TokenTable, tolerance: float) -> Iterator[Finding]:
    """Tell of tokens whose difference is far above the tolerance.

    Args:
        fresh: an environment's trained tokens that exactly the trainer's weights sampled
        tolerance: for the mean |difference|
    """
    limit = SINGLE_TOKEN_FACTOR * tolerance
    # Logprobs at a temperature below 1 are noisier, as in `Distance`.
    noise = fresh.diff.abs() * fresh.temperature.clamp(max=1.0)
    distant = fresh.where(noise > limit)
    if len(distant):
        is_near = distant.diff.abs() <= BFLOAT16_STEP * distant.logp.abs()
        logged = distant.behaviour_logp
        is_rounding = bool((is_near & (rounded_to_bfloat16(logged) == logged)).all())
        yield Finding(
            CheckName.SINGLE_TOKENS,
            env_id,
            f"exactly the trainer's weights sampled {len(fresh)} trained tokens, but the behaviour "
            f"logprobs of {len(distant)} of them, in {len(distant.sequences())} completions, "
            f"differ from the trainer's by more than {limit:.2g}, by "
            f"{float(distant.diff.abs().max()):.2g} at most",
            _PRECISION if is_rounding else _TOKENS,
        )
