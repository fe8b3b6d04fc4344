"""Checks that tokens were sampled from the whole distribution, and from the policy at all.

The probability integral transform: order the vocabulary by probability. Let u be the probability
of all tokens above the sampled one, plus a random part of its own. If the token was sampled from
this distribution, u is uniform between 0 and 1, whatever the distribution is (Rosenblatt 1952,
Remarks on a multivariate transformation; for discrete values randomised as in Brockwell 2007).
Sampling with top_p, top_k, min_p or a lower temperature leaves the upper end empty, even if every
logprob is that of the whole distribution.

Older tokens count with their importance ratio, which makes them tokens of the current policy.

The training pass computes u of some tokens of each step (`model/forward`). Every fourth step looks
at the recent tokens: if the logprobs of many differ, some sequences of an earlier step are computed
again, which measures how far the policy moved. Tokens whose logprobs differ by far more are not the
ones that were sampled, or have another prompt.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.findings import CheckName, Finding
from grpo_trainer.data.collate import Batch, MicroBatch
from grpo_trainer.model.forward import ForwardPass
from grpo_trainer.model.logprobs import logprobs_of, probe_tokens, tolerance_of
from grpo_trainer.model.policy import CausalLM, device_of, vocabulary_of
from grpo_trainer.model.reference import Reference
from grpo_trainer.token_table import TokenTable

LOOK_EVERY_STEPS = 4
WINDOW_STEPS = 8
EDGES = (0.8, 0.9, 0.95)
"""The upper end of u begins here."""
STANDARD_ERRORS = 4.5
MAX_SHARE = 0.5
"""An end with more than half of its expected tokens is not missing."""
MIN_TOKENS = 32
DISTANT_NATS = 1.0
DISTANT_MOVEMENTS = 2.0
"""A token is distant if its logprobs differ by more than one nat and twice the movement."""
DISTANT_SHARE = 0.05
"""Of the tokens, in two looks in a row. One step with a large gradient can move some tokens by
several nats: seen twice in 650 healthy steps, at one look each."""
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


@dataclass(frozen=True)
class _Sample:
    """Some sequences, and the policy's logprobs of their trained tokens at that step: [n]"""

    step: int
    micro: MicroBatch
    logp: Tensor


class SamplingCheck:
    """Remembers the last steps.

    Args:
        policy: the trainer's
        forward: the training pass
    """

    def __init__(self, policy: CausalLM, forward: ForwardPass) -> None:
        self._policy = policy
        self._forward = forward
        self._ends: defaultdict[int | None, deque[_EndCounts]] = defaultdict(
            lambda: deque(maxlen=WINDOW_STEPS)
        )
        self._earlier: _Sample | None = None
        self._doubted: set[int | None] = set()

    def findings(
        self, table: TokenTable, is_logged: Tensor, batch: Batch, held: PolicyVersion
    ) -> Iterator[Finding]:
        """Args:
        table: N trained tokens
        is_logged: [N] whether the behaviour logprobs were logged
        held: version of the policy's weights
        """
        earlier, is_look = self._earlier, held.step % LOOK_EVERY_STEPS == 0
        if is_look:
            self._earlier = _some(table, batch, held.step)
        table = table.where(is_logged)
        if not len(table):
            return
        part = table.where(~table.above.isnan())
        place, weight = _place(part, held.step), part.diff.exp().clamp(max=MAX_WEIGHT)
        recent = torch.tensor([_is_recent(origin.version, held) for origin in batch.origins])
        env_ids = [origin.env_id for origin in batch.origins]
        for env_id in dict.fromkeys(env_ids):
            of_env = torch.tensor([other == env_id for other in env_ids])  # [sequences]
            mine, ends = of_env[part.sequence], self._ends[env_id]
            ends.append(_EndCounts.of(place[mine], weight[mine]))
            yield from _of_ends(env_id, ends)
            if is_look and earlier is not None and earlier.step < held.step:
                is_recent = (of_env & recent)[table.sequence]
                yield from self._of_distance(env_id, table.where(is_recent), earlier)

    def _of_distance(
        self, env_id: int | None, recent: TokenTable, earlier: _Sample
    ) -> Iterator[Finding]:
        was_doubted = env_id in self._doubted
        self._doubted.discard(env_id)
        if len(recent) < MIN_TOKENS or _share_beyond(DISTANT_NATS, recent) < DISTANT_SHARE:
            return
        # Another forward pass, which healthy runs hardly ever need.
        movement = self._movement(earlier)
        bound = DISTANT_NATS + DISTANT_MOVEMENTS * movement
        share = _share_beyond(bound, recent)
        if share < DISTANT_SHARE:
            return
        self._doubted.add(env_id)
        if was_doubted:
            yield Finding(
                CheckName.OTHER_TOKENS,
                env_id,
                f"the logprobs of {100 * share:.0f} % of {len(recent)} tokens, which are at most "
                f"{LOOK_EVERY_STEPS} steps old, differ from the trainer's by more than {bound:.1f},"
                f" but the policy's logprobs moved by {movement:.2f} in as many steps (root mean "
                "square)",
                "let the environment send the token ids of the server's response, and the prompt "
                "that it sent to the server; check the temperature that it states",
            )

    def _movement(self, earlier: _Sample) -> float:
        """Root mean square change of an earlier step's logprobs since that step."""
        device, trained = device_of(self._policy), earlier.micro.token_weight > 0
        with torch.no_grad():
            logp = self._forward(self._policy, earlier.micro.to(device)).logp.cpu()
        return float((logp[trained] - earlier.logp).double().square().mean().sqrt())


def _some(table: TokenTable, batch: Batch, step: int) -> _Sample | None:
    """The first rows of the batch, an eighth of it at most; None without any trained token."""
    micro = batch.micro_batches[0].first_rows(-(-len(batch.order) // 8))
    logp = table.logp[table.sequence < len(micro.lengths)]
    return _Sample(step, micro, logp) if len(logp) else None


def _place(part: TokenTable, step: int) -> Tensor:
    """[N] u of each token."""
    # A generator of its own: the run's random numbers must not depend on checks.
    random = torch.rand(len(part), generator=torch.Generator().manual_seed(step))
    return part.above + random * part.logp.exp()


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


def _share_beyond(bound: float, table: TokenTable) -> float:
    """Share of the tokens whose logprobs differ by more."""
    return float((table.diff.abs() > bound).double().mean())


EVERY_STEPS = 4
PROBE_TOKENS = 16


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
        moved = float((self._logprobs() - self._first).abs().mean())
        if moved > self._tolerance:
            yield Finding(
                CheckName.REFERENCE_MOVED,
                None,
                f"the reference model's logprobs of {PROBE_TOKENS} fixed tokens changed by "
                f"{moved:.2g} on average since the start, so the KL penalty no longer holds the "
                "policy near --model",
                "the reference model must share no trained weights with the policy: in the LoRA "
                "modes, check that only the adapter is trained",
            )

    def _logprobs(self) -> torch.Tensor:
        with self._reference.active():
            return logprobs_of(self._reference.model, self._tokens)
