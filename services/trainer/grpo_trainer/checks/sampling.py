"""Checks that tokens were sampled from the whole distribution, and from the policy at all.

The probability integral transform: order the vocabulary by probability. Let u be the probability
of all tokens above the sampled one, plus a random part of its own. If the token was sampled from
this distribution, u is uniform between 0 and 1, whatever the distribution is (Rosenblatt 1952,
Remarks on a multivariate transformation; for discrete values randomised as in Brockwell 2007).
Sampling with top_p, top_k, min_p or a lower temperature leaves the upper end empty, even if every
logprob is that of the whole distribution.

Older tokens count with their importance ratio, which makes them tokens of the current policy.

`RatioCheck` needs no distribution: it looks at the mean importance ratio.

The training pass computes u of some tokens of each step (`model/forward`). Every fourth step looks
at the recent tokens: if the logprobs of many differ, some sequences of an earlier step are computed
again, which measures how far the policy moved. Tokens whose logprobs differ by far more are not the
ones that were sampled, or have another prompt.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.findings import CheckName, Finding
from grpo_trainer.data.collate import Batch, MicroBatch
from grpo_trainer.model.forward import ForwardPass
from grpo_trainer.model.policy import CausalLM, device_of
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
        self._ends: defaultdict[int | None, deque[Tensor]] = defaultdict(
            lambda: deque(maxlen=WINDOW_STEPS)
        )
        self._earlier: _Sample | None = None
        self._doubted: set[int | None] = set()

    def findings(
        self, table: TokenTable, is_logged: Tensor, batch: Batch, current: PolicyVersion
    ) -> Iterator[Finding]:
        """Compare how a batch was sampled with how the policy would have sampled.

        Args:
            table: N trained tokens
            is_logged: [N] whether the behaviour logprobs were logged
            current: version of the policy's weights
        """
        earlier, is_look = self._earlier, current.step % LOOK_EVERY_STEPS == 0
        if is_look:
            self._earlier = _some(table, batch, current.step)
        table = table.where(is_logged)
        if not len(table):
            return
        part = table.where(~table.above.isnan())
        place, weight = _place(part, current.step), part.diff.exp().clamp(max=MAX_WEIGHT)
        # At most as old as the tokens that measure the movement.
        recent = table.of_sequences(
            s.version is not None
            and s.version.epoch == current.epoch
            and current.step - s.version.step <= LOOK_EVERY_STEPS
            for s in batch.sequences
        )
        env_ids = [sequence.group.env_id for sequence in batch.sequences]
        for env_id in dict.fromkeys(env_ids):
            mine = part.of_sequences(other == env_id for other in env_ids)
            ends = self._ends[env_id]
            ends.append(_end_sums(place[mine], weight[mine]))
            yield from _of_ends(env_id, ends)
            if is_look and earlier is not None and earlier.step < current.step:
                is_mine = table.of_sequences(other == env_id for other in env_ids)
                yield from self._of_distance(env_id, table.where(is_mine & recent), earlier)

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
                f"the logprobs of {100 * share:.0f} % of {len(recent)} tokens differ from the "
                f"trainer's by more than {bound:.1f} after at most {LOOK_EVERY_STEPS} steps; the "
                f"policy's moved by {movement:.2f} in as many steps (root mean square)",
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


def _end_sums(place: Tensor, weight: Tensor) -> Tensor:
    """[3, E] of each edge: how much weight is beyond it, how much is expected there, and its
    variance. Args: place: [N] u of each token; weight: [N] importance ratios"""
    edges = torch.tensor(EDGES, dtype=torch.float64)
    is_beyond = place.double().unsqueeze(-1) > edges  # [N, E]
    weight = weight.double().unsqueeze(-1)
    columns = weight * is_beyond, weight * (1 - edges), weight.square() * edges * (1 - edges)
    return torch.stack(columns).sum(1)


def _of_ends(env_id: int | None, steps: Iterable[Tensor]) -> Iterator[Finding]:
    """Sum up [3, E] of each step, and compare tokens beyond the edges with their expectation."""
    beyond, expected, variance = torch.stack([*steps]).sum(0)
    errors = (expected - beyond) / variance.clamp_min(1e-12).sqrt()  # [E]
    is_missing = (errors > STANDARD_ERRORS) & (beyond < MAX_SHARE * expected)
    if bool(is_missing.any()):
        worst = int(torch.where(is_missing, errors, 0.0).argmax())
        share = 100 * (1 - EDGES[worst])
        yield Finding(
            CheckName.TRUNCATED_SAMPLING,
            env_id,
            f"improbable tokens are missing: of the sampled tokens, {share:.0f} % should be in the "
            f"least probable {share:.0f} % of the policy's distribution, but "
            f"{float(share * beyond[worst] / expected[worst]):.1f} % are "
            f"({errors[worst]:.0f} standard errors)",
            "check whether the environment or the server samples with top_p, top_k, min_p or a "
            "temperature that the groups do not state",
        )


def _share_beyond(bound: float, table: TokenTable) -> float:
    """Share of the tokens whose logprobs differ by more."""
    return float((table.diff.abs() > bound).double().mean())


RATIO_STANDARD_ERRORS = 6.0
MIN_RATIO_TOKENS = 64
MIN_EFFECT = {"first": 0.05, "last": 0.3, "all": 0.05}
"""By place. Smaller differences from 1 are accepted: environments drop groups, and which ones
depends weakly on the sampled tokens. In 150 healthy steps the mean of all tokens was 1.001."""
MAX_RATIO = 10.0
"""Larger ratios count as this one. Otherwise a few of them, which a wrong log produces, would make
the standard error as large as the mean."""


class RatioCheck:
    """The mean importance ratio of sampled tokens with their own logprobs is 1, however old they
    are. Remembers the sums of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[dict[tuple[int | None, str], Tensor]] = deque(maxlen=WINDOW_STEPS)

    def findings(self, table: TokenTable, env_ids: Sequence[int | None]) -> Iterator[Finding]:
        """Add a step's tokens, and judge the last steps.

        Args:
            table: N trained tokens whose behaviour logprobs were logged
            env_ids: of each sequence of the batch
        """
        self._steps.append(_ratio_sums(table, env_ids))
        for env_id, place in self._steps[-1]:
            seen = [step[env_id, place] for step in self._steps if (env_id, place) in step]
            n, off, square = torch.stack(seen).sum(0).tolist()
            errors = abs(off) / max(square, 1e-12) ** 0.5
            is_large = abs(off) > MIN_EFFECT[place] * n
            if n >= MIN_RATIO_TOKENS and is_large and errors > RATIO_STANDARD_ERRORS:
                yield Finding(
                    CheckName.IMPORTANCE_RATIO,
                    env_id,
                    f"the mean importance ratio of {int(n)} tokens ({place} of each completion) is "
                    f"{1 + off / n:.3f}, {errors:.0f} standard errors away from 1. For sampled "
                    "tokens with their own logprobs it is 1, however old they are",
                    "check that inference_logprobs are those of the sampled tokens, at the "
                    "temperature that the group states, and that prompt, tokens and masks are "
                    "those of the server's response",
                )


def _ratio_sums(
    table: TokenTable, env_ids: Sequence[int | None]
) -> dict[tuple[int | None, str], Tensor]:
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
