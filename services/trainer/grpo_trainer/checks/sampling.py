"""Checks that tokens were sampled from the logged distribution, and from all of it.

Both hold under any policy, so they judge old tokens too. The first: the mean importance ratio of
sampled tokens is 1, however old they are.

The second is the probability integral transform: order the vocabulary by probability. Let u be the
probability of all tokens above the sampled one, plus a random part of its own. If the token was
sampled from this distribution, u is uniform between 0 and 1, whatever the distribution is
(Rosenblatt 1952, Remarks on a multivariate transformation; for discrete values randomised as in
Brockwell 2007). Sampling with top_p, top_k, min_p or a lower temperature leaves the upper end
empty, even if every logprob is that of the whole distribution. Older tokens count with their
importance ratio, which makes them tokens of the current policy.

Ratios are cut off at 2, so that a few cannot decide. A mean can thus be too small because the
policy moved to other tokens, by its total variation at most, which `Movement` measures.

Only completions count whose siblings alone have different scores. The environment would have kept
such a group whatever this completion is, so that its choice of groups does not shift the means.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.checks.evidence import Allowance, Evidence
from grpo_trainer.checks.findings import CheckName, Finding
from grpo_trainer.data.collate import Batch
from grpo_trainer.token_table import TokenTable

MAX_RATIO = 2.0
EDGES = (0.8, 0.9, 0.95)
"""The upper end of u begins here."""
_CHANCE = "In healthy data, this happens once in 1e9 batches"


class UnfilteredGroups:
    """Finds completions that no choice of groups by their scores depends on."""

    def __init__(self) -> None:
        self._keep_equal: set[int | None] = set()

    def of(self, batch: Batch) -> list[bool]:
        """Of each sequence, whether its group would also have been sent with another one in its
        place. An environment that has sent a group with equal scores sends all."""
        self._keep_equal |= {g.env_id for g in batch.groups if g.size > 1 == len(set(g.scores))}
        return [
            s.group.env_id in self._keep_equal or _is_mixed_without(s.group, s.index)
            for s in batch.sequences
        ]


def _is_mixed_without(group: ScoredGroup, index: int) -> bool:
    own = group.rollouts[index]
    pairs = zip(group.rollouts, group.scores, strict=True)
    return len({score for rollout, score in pairs if rollout != own}) > 1


class RatioCheck:
    """The mean importance ratio of sampled tokens with their own logprobs."""

    def __init__(self) -> None:
        self.evidence = Evidence()

    def findings(
        self, table: TokenTable, env_id: int | None, allowance: Allowance
    ) -> Iterator[Finding]:
        """Add a batch's tokens of an environment, and judge all so far.

        Args:
            table: trained tokens whose behaviour logprobs were logged
            allowance: the total variation of the policy since they were sampled
        """
        off = table.diff.double().exp().clamp(max=MAX_RATIO) - 1  # [N]
        for place, chosen in (("first", is_first(table)), ("all", slice(None))):
            some, key = off[chosen], (env_id, place)
            is_high = self.evidence.suffices((key, 1), some)
            if self.evidence.suffices((key, -1), -some, allowance) or is_high:
                yield Finding(
                    CheckName.IMPORTANCE_RATIO,
                    env_id,
                    f"the mean importance ratio of {len(some)} tokens ({place} of each completion) "
                    f"is {1 + float(some.mean()):.3f}, if larger ones count as {MAX_RATIO:g}. For "
                    "sampled tokens with their own logprobs it is 1, except for the policy's own "
                    f"movement. {_CHANCE}",
                    "check that inference_logprobs are those of the sampled tokens, at the "
                    "temperature that the group states, and that prompt, tokens and masks are "
                    "those of the server's response",
                )


class SamplingCheck:
    """The upper end of the distribution."""

    def __init__(self) -> None:
        self.evidence = Evidence()

    def findings(
        self, table: TokenTable, env_id: int | None, step: int, allowance: Allowance
    ) -> Iterator[Finding]:
        """As `RatioCheck.findings`."""
        part = table.where(~table.above.isnan())
        if not len(part):
            return
        place, weight = _place(part, step), part.diff.double().exp().clamp(max=MAX_RATIO)
        for edge in EDGES:
            beyond = weight * (place > edge)  # [N]
            if self.evidence.suffices((env_id, edge), 1 - edge - beyond, allowance):
                share = 100 * (1 - edge)
                yield Finding(
                    CheckName.TRUNCATED_SAMPLING,
                    env_id,
                    f"improbable tokens are missing: of {len(part)} sampled tokens, {share:.0f} % "
                    f"should be in the least probable {share:.0f} % of the policy's distribution, "
                    f"but {100 * float(beyond.mean()):.1f} % are. {_CHANCE}",
                    "check whether the environment or the server samples with top_p, top_k, min_p "
                    "or a temperature that the groups do not state",
                )
                return


def is_first(table: TokenTable) -> Tensor:
    """[N] bool, the first trained token of each sequence."""
    edge = torch.ones(min(1, len(table)), dtype=torch.bool)
    return torch.cat([edge, table.sequence[1:] != table.sequence[:-1]])


def _place(part: TokenTable, step: int) -> Tensor:
    """[N] u of each token."""
    # A generator of its own: the run's random numbers must not depend on checks.
    random = torch.rand(len(part), generator=torch.Generator().manual_seed(step))
    return part.above + random * part.logp.exp()
