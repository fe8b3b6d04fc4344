"""Were the completions sampled by the weights, tokens and temperature that their group names?

A completion whose first and last token carry the version that the trainer holds was sampled by
exactly these weights, so both sides' log-probabilities of it agree to numerical noise. Whatever
breaks that (logprobs beside their tokens, a wrong temperature, prompt tokens among the trained
ones, a server with other weights) is found on the batch that shows it, before its update.

For completions of older or unknown weights a difference alone proves nothing: the policy moved.
There the run ends only where one assumption explains the logprobs far better than what the group
says: nearly all of the difference at once, or most of it twice in a row.

Completions of one prompt are sampled independently, so that all of them begin with the same tokens
is a matter of chance, and the policy knows how small a chance. A prompt among the trained tokens
is such a beginning, whatever log-probabilities were sent with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_core.errors import GrpoError
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.algo.logprob_comparison import Distance, TokenTable
from grpo_trainer.data.collate import Batch, Origin
from grpo_trainer.errors import RolloutMismatch
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.model.policy_protocol import CausalLM
from grpo_trainer.verify.alignment import MISMATCH, ServedLogprobs
from grpo_trainer.verify.causes import (
    UNCHANGED,
    Cause,
    ServerAnswer,
    mismatch_report,
    other_temperature,
    shifted_logprobs,
    subsample,
    without_shared_prefix,
)

SUSPICIOUS = 0.05
"""Mean |difference| from which on completions of older weights are looked at."""
FAR_BETTER = 4.0
"""Factor by which an assumption must reduce the difference, in two batches in a row, to be believed
without fresh completions."""
DECISIVE = 16.0
"""The same where one batch is enough."""
PROOF_TOKENS = 16
"""Fresh tokens that clear their environment's other completions in the same batch."""
SERVER_SAMPLE_SEQUENCES = 4
CHANCE_NATS = 30.0
"""exp(-30) is 1e-13."""
DRIFT_NATS = 0.2
"""What a token's log-probability may have lost since it was sampled. It is not held against the
group: over a long beginning that is all but certain, it would add up."""
MAX_SIBLINGS = 7
"""More would only multiply the errors of the policy's log-probabilities."""


@dataclass(frozen=True)
class RolloutCheck:
    """Args:
    policy: the trainer's, for assumptions that need another forward pass
    served_logprobs: the server's answer, asked only where something is wrong
    tolerance: bound on the mean |difference| of fresh completions, for the served data type
    """

    policy: CausalLM
    served_logprobs: ServedLogprobs
    tolerance: float
    _suspected: set[int | None] = field(init=False, default_factory=set)

    def require_match(
        self, batch: Batch, table: TokenTable, version: PolicyVersion, step: int
    ) -> Distance:
        """Check a batch by environment; returns the distance of its fresh tokens.

        Args:
            table: the batch's trained tokens under the weights that `version` names.

        Raises:
            RolloutMismatch: names the environment, the numbers and the likeliest cause.
        """
        fresh = _of_sequence(table, (origin.version == version for origin in batch.origins))
        for env_id in dict.fromkeys(origin.env_id for origin in batch.origins):
            mine = _of_sequence(table, (origin.env_id == env_id for origin in batch.origins))
            case = _EnvironmentBatch(step, env_id, batch)
            self._check_fresh(case, table.where(mine & fresh))
            self._check_shared_prefixes(case, table.where(mine))
            if int((mine & fresh).sum()) < PROOF_TOKENS:
                self._check_older(case, table.where(mine & ~fresh))
        return Distance.of(table.where(fresh))

    def _check_fresh(self, case: _EnvironmentBatch, fresh: TokenTable) -> None:
        found = Distance.of(fresh)
        if found.lower_bound <= self.tolerance:
            return
        part = subsample(fresh)
        raise RolloutMismatch(
            mismatch_report(
                f"{case}: {found.tokens} trained tokens were sampled by exactly the "
                f"weights that the trainer holds, but the log-probabilities logged with them "
                f"differ from the trainer's by {found.mean:.2g} on average, {found.max:.2g} at "
                f"most (tolerance {self.tolerance:g}).",
                sent=part.mean_distance(),
                tried=[
                    *shifted_logprobs(part),
                    *without_shared_prefix(part, case.batch),
                    *other_temperature(self.policy, part, case.batch),
                ],
                tolerance=self.tolerance,
                server=self._ask_server(part, case.batch),
            )
        )

    def _check_older(self, case: _EnvironmentBatch, older: TokenTable) -> None:
        found = Distance.of(older)
        if found.lower_bound <= max(SUSPICIOUS, self.tolerance):
            self._suspected.discard(case.env_id)
            return
        part = subsample(older)
        sent = part.mean_distance()
        tried = [*shifted_logprobs(part), *other_temperature(self.policy, part, case.batch)]
        factor = max((sent / max(h.mean, 1e-9) for h in tried), default=0.0)
        confirmed = factor >= DECISIVE or (factor >= FAR_BETTER and case.env_id in self._suspected)
        if factor >= FAR_BETTER:
            self._suspected.add(case.env_id)
        else:
            self._suspected.discard(case.env_id)
        if not confirmed:
            return
        summary = (
            f"{case}: the log-probabilities logged with {found.tokens} trained tokens differ from "
            f"the trainer's by {found.mean:.2g} on average, {found.max:.2g} at most. Older weights "
            "sampled them, or weights that nobody names, so some difference may be right, but one "
            f"assumption makes it {factor:.0f} times smaller."
        )
        raise RolloutMismatch(mismatch_report(summary, sent, tried, self.tolerance))

    def _check_shared_prefixes(self, case: _EnvironmentBatch, table: TokenTable) -> None:
        origins = case.batch.origins
        groups = {origin.group for origin in origins if origin.env_id == case.env_id}
        unlikely = groups_with_unlikely_prefix(table, origins)
        if 2 * len(unlikely) > len(groups):
            raise RolloutMismatch(
                f"{MISMATCH} {case}: in {len(unlikely)} of {len(groups)} groups all completions "
                "begin with the same trained tokens, which independent sampling at the stated "
                f"temperature gives with a chance below 1e-13. Likely cause: "
                f"{Cause.PROMPT_TRAINED}. (Or they were sampled at a far lower temperature than "
                f"stated.) {UNCHANGED}"
            )

    def _ask_server(self, part: TokenTable, batch: Batch) -> ServerAnswer:
        differences = []
        try:
            for number in part.sequences()[:SERVER_SAMPLE_SEQUENCES]:
                length = int(part.position[part.sequence == number].max()) + 1
                differences.append(self._from_server(batch.tokens(number, length)))
        except GrpoError as error:
            return ServerAnswer(None, f"not answered: {error}")
        mean = float(torch.cat(differences).mean())
        return ServerAnswer(mean, f"{mean:.2g}")

    def _from_server(self, tokens: Tensor) -> Tensor:
        """|server's - trainer's| now, at temperature 1: [T] → [T-1]."""
        ids: list[int] = tokens.tolist()
        ours = logprobs_of(self.policy, ids)
        return (ours - torch.tensor(self.served_logprobs(ids))).abs()


@dataclass(frozen=True)
class _EnvironmentBatch:
    """One environment's part of one batch."""

    step: int
    env_id: int | None
    batch: Batch

    def __str__(self) -> str:
        return f"Step {self.step}, environment {self.env_id}"


def _of_sequence(table: TokenTable, flags: Iterable[bool]) -> Tensor:
    """A fact of each sequence, as one of each token: [N] bool."""
    return torch.tensor(list(flags))[table.sequence]


def groups_with_unlikely_prefix(table: TokenTable, origins: Sequence[Origin]) -> set[int]:
    """Groups (by their place in the batch) whose shared trained tokens have a chance below 1e-13.

    The first completion may begin as it likes; each of its siblings repeats it by chance.

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
