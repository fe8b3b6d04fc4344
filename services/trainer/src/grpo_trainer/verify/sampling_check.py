"""Checks that tokens were sampled from the whole distribution, and from the policy at all.

The probability integral transform: order the vocabulary by probability. Let u be the probability
of all tokens above the sampled one, plus a random part of its own. If the token was sampled from
this distribution, u is uniform between 0 and 1, whatever the distribution is (Rosenblatt 1952,
Remarks on a multivariate transformation; for discrete values randomised as in Brockwell 2007).
Sampling with top_p, top_k, min_p or a lower temperature leaves the upper end empty, even if every
logprob is that of the whole distribution.

Older tokens count with their importance ratio, which makes them tokens of the current policy.

The training pass computes u of some tokens of each step (`model/forward`). At every fourth step a
few tokens of an earlier step are computed again, which measures how far the policy moved. Older
tokens whose logprobs differ by far more are not the ones that were sampled, or have another prompt.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.algo.logprob_comparison import TokenTable
from grpo_trainer.data.collate import Batch
from grpo_trainer.model.policy_protocol import CausalLM
from grpo_trainer.verify.findings import CheckName, Finding
from grpo_trainer.verify.recomputed import SAMPLE_SEQUENCES, logit_chunks, subsample, targets_of

LOOK_EVERY_STEPS = 4
WINDOW_STEPS = 8
EDGES = (0.8, 0.9, 0.95)
"""The upper end of u begins here."""
STANDARD_ERRORS = 4.5
MAX_SHARE = 0.5
"""An end with more than half of its expected tokens is not missing."""
MIN_TOKENS = 32
MOVEMENT_FACTOR = 16.0
MIN_SQUARE = 0.25
"""A smaller mean square difference is not judged, in nats squared."""
MAX_WEIGHT = 3.0
"""Bound on an older token's importance ratio, so that few tokens do not decide."""


@dataclass(frozen=True)
class _EndCounts:
    """Sums over tokens, for each edge: [E]. `weight`: of the importance ratios."""

    beyond: Tensor
    expected: Tensor
    variance: Tensor

    @classmethod
    def of(cls, place: Tensor, weight: Tensor) -> _EndCounts:
        """Args: place: [N] u of each token; weight: [N]"""
        edges = torch.tensor(EDGES, dtype=torch.float64)
        is_beyond = place.double().unsqueeze(-1) > edges  # [N, E]
        weight = weight.double().unsqueeze(-1)
        return cls(
            (weight * is_beyond).sum(0),
            (weight * (1 - edges)).sum(0),
            (weight.square() * edges * (1 - edges)).sum(0),
        )


class SamplingCheck:
    """Remembers the last steps.

    Args:
        policy: the trainer's
        splits_head: see `logit_chunks`
    """

    def __init__(self, policy: CausalLM, splits_head: bool) -> None:
        self._policy = policy
        self._splits_head = splits_head
        self._ends: defaultdict[int | None, deque[_EndCounts]] = defaultdict(
            lambda: deque(maxlen=WINDOW_STEPS)
        )
        self._earlier: tuple[TokenTable, Batch] | None = None

    def findings(self, table: TokenTable, batch: Batch, held: PolicyVersion) -> Iterator[Finding]:
        """Args:
        table: trained tokens whose behaviour logprobs were logged
        held: version of the policy's weights
        """
        if not len(table):
            return
        movement = None
        if held.step % LOOK_EVERY_STEPS == 0:
            movement = self._movement()
            self._earlier = subsample(_spread(table)), batch
        part = table.where(~table.above.isnan())
        place, weight = _place(part, held.step), part.diff.exp().clamp(max=MAX_WEIGHT)
        recent = torch.tensor([_is_recent(origin.version, held) for origin in batch.origins])
        env_ids = [origin.env_id for origin in batch.origins]
        for env_id in dict.fromkeys(env_ids):
            of_env = torch.tensor([other == env_id for other in env_ids])  # [sequences]
            mine, ends = of_env[part.sequence], self._ends[env_id]
            ends.append(_EndCounts.of(place[mine], weight[mine]))
            yield from _of_ends(env_id, ends)
            if movement is not None:
                is_recent = (of_env & recent)[table.sequence]
                yield from _of_distance(env_id, table.where(is_recent), movement)

    def _movement(self) -> float | None:
        """Mean square change of an earlier step's logprobs since that step."""
        if self._earlier is None:
            return None
        part, batch = self._earlier
        targets, logps, first = targets_of(part, batch), [], 0
        for logits in logit_chunks(self._policy, part, batch, self._splits_head):
            mine = slice(first, first + len(logits))
            first += len(logits)
            scaled = logits / part.temperature[mine].to(logits.device).unsqueeze(-1)
            chosen = targets[mine].to(logits.device).unsqueeze(-1)
            logps.append(scaled.log_softmax(-1).gather(-1, chosen).squeeze(-1).cpu())
        return float((torch.cat(logps) - part.logp).double().square().mean())


def _place(part: TokenTable, step: int) -> Tensor:
    """[N] u of each token."""
    # A generator of its own: the run's random numbers must not depend on checks.
    random = torch.rand(len(part), generator=torch.Generator().manual_seed(step))
    return part.above + random * part.logp.exp()


def _spread(table: TokenTable) -> TokenTable:
    """Tokens of at most a quarter of the sequences, spread over the batch."""
    sequences = table.sequences()
    chosen = sequences[:: max(4, len(sequences) // SAMPLE_SEQUENCES)]
    return table.where(torch.isin(table.sequence, torch.tensor(chosen)))


def _is_recent(version: PolicyVersion | None, held: PolicyVersion) -> bool:
    """Whether the version is at most as old as the tokens that measure the movement."""
    if version is None or version.epoch != held.epoch:
        return False
    return held.step - version.step <= LOOK_EVERY_STEPS


def _of_ends(env_id: int | None, steps: Iterable[_EndCounts]) -> Iterator[Finding]:
    beyond, expected, variance = (
        torch.stack([getattr(step, name) for step in steps]).sum(0)
        for name in ("beyond", "expected", "variance")
    )
    errors = (expected - beyond) / variance.clamp_min(1e-12).sqrt()  # [E]
    is_missing = (errors > STANDARD_ERRORS) & (beyond < MAX_SHARE * expected)
    if bool(is_missing.any()):
        worst = int(torch.where(is_missing, errors, 0.0).argmax())
        yield Finding(
            CheckName.TRUNCATED_SAMPLING,
            env_id,
            f"improbable tokens are missing: of the sampled tokens, {100 * (1 - EDGES[worst]):.0f} "
            f"% should be in the least probable {100 * (1 - EDGES[worst]):.0f} % of the policy's "
            f"distribution, but {_percent(beyond, expected, worst):.1f} % are "
            f"({errors[worst]:.0f} standard errors)",
            "check whether the environment or the server samples with top_p, top_k, min_p or a "
            "temperature that the groups do not state",
        )


def _percent(beyond: Tensor, expected: Tensor, edge: int) -> float:
    return float(100 * (1 - EDGES[edge]) * beyond[edge] / expected[edge])


def _of_distance(env_id: int | None, recent: TokenTable, movement: float) -> Iterator[Finding]:
    if len(recent) < MIN_TOKENS:
        return
    square = float(recent.diff.double().square().mean())
    if square > max(MOVEMENT_FACTOR * movement, MIN_SQUARE):
        yield Finding(
            CheckName.OTHER_TOKENS,
            env_id,
            f"the behaviour logprobs of {len(recent)} tokens, which are at most "
            f"{LOOK_EVERY_STEPS} steps old, differ from the trainer's by {square**0.5:.2f} (root "
            f"mean square), but the policy's logprobs moved by {movement**0.5:.2f} in as many "
            "steps",
            "let the environment send the token ids of the server's response, and the prompt that "
            "it sent to the server; check the temperature that it states",
        )
