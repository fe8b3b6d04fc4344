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

import math
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_core.errors import GrpoError
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.causes import (
    UNCHANGED,
    Cause,
    Hypothesis,
    ServerAnswer,
    mismatch_report,
    recomputed,
    rounded_logprobs,
    rounded_to_bfloat16,
    scaled_logprobs,
    shifted_logprobs,
    subsample,
    without_shared_prefix,
)
from grpo_trainer.checks.findings import CheckName, Finding
from grpo_trainer.checks.served_weights import MISMATCH, ServedLogprobs
from grpo_trainer.data.collate import Batch, Origin
from grpo_trainer.errors import RolloutMismatch
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.token_table import Distance, TokenTable

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


SINGLE_TOKEN_FACTOR = 20.0
"""A token whose |difference| exceeds the tolerance by this factor is reported. Healthy maxima are
far below it. Measured with SmolLM2-135M: 2e-5 in float32 (tolerance 2e-4), 0.4 in bfloat16
(tolerance 0.25). A token that was not sampled differs by several nats."""
BFLOAT16_STEP = 2.0**-8
"""Largest relative difference between a number and its rounding to bfloat16."""
_TOKENS = (
    "let the environment send the token ids of the server's response, and not encode text again"
)
_PRECISION = (
    "let the environment send inference_logprobs in float32, as the server returns them: rounding "
    "to bfloat16 explains these differences"
)


def single_tokens(env_id: int | None, fresh: TokenTable, tolerance: float) -> Iterator[Finding]:
    """Args:
    fresh: an environment's trained tokens that exactly the trainer's weights sampled
    tolerance: for the mean |difference|
    """
    limit = SINGLE_TOKEN_FACTOR * tolerance
    # Logprobs at a temperature below 1 are noisier, as in `Distance`.
    noise = fresh.diff.abs() * fresh.temperature.clamp(max=1.0)
    distant = fresh.where(noise > limit)
    if len(distant):
        yield Finding(
            CheckName.SINGLE_TOKENS,
            env_id,
            f"exactly the trainer's weights sampled {len(fresh)} trained tokens, but the behaviour "
            f"logprobs of {len(distant)} of them, in {len(distant.sequences())} completions, "
            f"differ from the trainer's by more than {limit:.2g}, by "
            f"{float(distant.diff.abs().max()):.2g} at most",
            _PRECISION if _is_rounding(distant) else _TOKENS,
        )


def _is_rounding(table: TokenTable) -> bool:
    is_near = table.diff.abs() <= BFLOAT16_STEP * table.logp.abs()
    return bool(
        (is_near & (rounded_to_bfloat16(table.behaviour_logp) == table.behaviour_logp)).all()
    )


WINDOW_STEPS = 8
MIN_TOKENS = 64
STANDARD_ERRORS = 6.0
MIN_EFFECT = {"first": 0.05, "last": 0.3, "all": 0.05}
"""By place. Smaller differences from 1 are accepted: environments drop groups, and which ones
depends weakly on the sampled tokens. In 150 healthy steps the mean of all tokens was 1.001."""
MAX_RATIO = 10.0
"""Larger ratios count as this one. Otherwise a few of them, which a wrong log produces, would make
the standard error as large as the mean."""


@dataclass(frozen=True)
class UnlikelyRatio:
    """`mean`: of the importance ratio. `errors`: how many standard errors it is away from 1."""

    env_id: int | None
    place: str
    tokens: int
    mean: float
    errors: float

    def __str__(self) -> str:
        return (
            f"the mean importance ratio of {self.tokens} tokens ({self.place} of each completion) "
            f"is {self.mean:.3f}, {abs(self.errors):.0f} standard errors away from 1"
        )


class RatioCheck:
    """Remembers the sums of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[dict[tuple[int | None, str], Tensor]] = deque(maxlen=WINDOW_STEPS)

    def unlikely(self, table: TokenTable, env_ids: Sequence[int | None]) -> list[UnlikelyRatio]:
        """Add a step's tokens, and judge the last steps.

        Args:
            table: N trained tokens whose behaviour logprobs were logged
            env_ids: of each sequence of the batch
        """
        self._steps.append(_sums(table, env_ids))
        found = []
        for env_id, place in self._steps[-1]:
            seen = [step[env_id, place] for step in self._steps if (env_id, place) in step]
            n, off, square = torch.stack(seen).sum(0).tolist()
            errors = off / max(square, 1e-12) ** 0.5
            is_large = abs(off) > MIN_EFFECT[place] * n
            if n >= MIN_TOKENS and is_large and abs(errors) > STANDARD_ERRORS:
                found.append(UnlikelyRatio(env_id, place, int(n), 1 + off / n, errors))
        return found


def _sums(table: TokenTable, env_ids: Sequence[int | None]) -> dict[tuple[int | None, str], Tensor]:
    """By environment and place: number of tokens, sum of ratio - 1, sum of its squares: [3]"""
    names = list(dict.fromkeys(env_ids))
    of_sequence = torch.tensor([names.index(env_id) for env_id in env_ids])
    off = table.diff.double().clamp(max=math.log(MAX_RATIO)).expm1()  # [N]
    columns = (torch.ones_like(off), off, off.square())
    values = torch.stack(columns, dim=1)  # [N, 3]
    env = of_sequence[table.sequence]  # [N]
    found: dict[tuple[int | None, str], Tensor] = {}
    for place, is_there in _places(table).items():
        totals = torch.zeros(len(names), 3, dtype=torch.float64)
        totals.index_add_(0, env[is_there], values[is_there])
        found |= {(names[i], place): total for i, total in enumerate(totals) if total[0]}
    return found


def _places(table: TokenTable) -> dict[str, Tensor]:
    """[N] bool of each place."""
    edge = torch.ones(min(1, len(table)), dtype=torch.bool)
    changes = table.sequence[1:] != table.sequence[:-1]  # [N-1]
    return {
        "first": torch.cat([edge, changes]),
        "last": torch.cat([changes, edge]),
        "all": torch.ones(len(table), dtype=torch.bool),
    }
