"""Evidence against healthy data, and what of it the policy's own movement may explain.

Testing by betting: if the data is healthy, an observation x has a mean of at most 0. Someone who
bets a quarter of a fortune on each multiplies it by 1 + x/4, so it does not grow on average, and
reaches e^21 with a probability below 1e-9 (Ville 1939). The fortune begins anew whenever it is
below 1, so that a late fault is found too. Then a healthy run makes at least 1e9 looks on average
before it reaches e^21, whatever the distribution of x is (e-detectors: Shin, Ramdas and Rinaldo,
arXiv 2203.03532): in 10,000 looks, its probability is about 1e-5.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.causes import SequenceTokens, logits_of, subsample, tokens_of
from grpo_trainer.data.collate import Batch
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.token_table import MIN_TOKENS, STANDARD_ERRORS, TokenTable

BET = 0.25
ALARM_NATS = 21.0
"""e^21 is 1.3e9."""
WORTH_A_PASS = 1.0
"""Of one batch, in nats. Healthy batches have more with a probability below 1/e."""
ROUNDING = 1e-4
"""Whatever the data type of the weights, both sides normalise their distributions in float32, with
a relative error of at most about 1e-5. It must not add up over a run."""
REMEMBERED_STEPS = 32

Allowance = Callable[[], float | None]
"""How far the policy's movement may raise the mean of x; None if it was not measured."""


class Evidence:
    """Adds up by key.

    `is_moot`: some evidence did not count since this was set to False, because the policy's
    movement may explain it, or was not measured."""

    def __init__(self) -> None:
        self._nats: defaultdict[Hashable, float] = defaultdict(float)
        self.is_moot = False

    def suffices(self, key: Hashable, x: Tensor, allowance: Allowance | None = None) -> bool:
        """Add a batch, and judge all since the fortune began anew.

        Args:
            x: [n] at least -2, and with a mean of at most 0 if the data is healthy
            allowance: without: movement does not matter
        """
        found = _nats(x, ROUNDING)
        if allowance is not None and found > WORTH_A_PASS:
            moved = allowance()
            found = 0.0 if moved is None else _nats(x, ROUNDING + moved)
            self.is_moot |= found <= 0
        elif allowance is not None:
            found = min(0.0, found)
        self._nats[key] = min(2 * ALARM_NATS, max(0.0, self._nats[key]) + found)
        return self._nats[key] > ALARM_NATS


def _nats(x: Tensor, allowance: float) -> float:
    """By how much the logarithm of the fortune grows."""
    return float((BET * (x.double() - allowance)).log1p().sum())


@dataclass(frozen=True)
class _Sample:
    """Some tokens, and what the weights of that version gave them: [n] each"""

    version: PolicyVersion
    tokens: SequenceTokens
    logp: Tensor
    temperature: Tensor


class Movement:
    """How the trainer's own logprobs of the same tokens have changed: remembers some sequences of
    each environment and step, and computes them again if a check asks."""

    def __init__(self, policy: CausalLM) -> None:
        self._policy = policy
        self._samples: defaultdict[int | None, deque[_Sample]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED_STEPS)
        )
        self._now = PolicyVersion(0, 0)
        self._known: dict[tuple[int | None, PolicyVersion], Tensor] = {}

    def remember(self, batch: Batch, table: TokenTable, now: PolicyVersion) -> None:
        """Args: table: the batch's trained tokens, with logprobs of the weights `now`"""
        self._now, self._known = now, {}
        env_ids = [sequence.group.env_id for sequence in batch.sequences]
        for env_id in dict.fromkeys(env_ids):
            mine = table.where(table.of_sequences(other == env_id for other in env_ids))
            if len(mine):
                part = subsample(mine)
                sample = _Sample(now, tokens_of(part, batch), part.logp, part.temperature)
                self._samples[env_id].append(sample)

    def total_variation(self, env_id: int | None, batch: Batch) -> float | None:
        """Of the policy and the one that sampled the environment's completions, at most: the mean
        of max(0, 1 - ratio). This is also how much less than 1 the mean of importance ratios can be
        that are cut off at 1 or above: there, the probability of tokens that became more likely is
        missing. None if it is unknown."""
        change = self._since(env_id, batch)
        return None if change is None else at_most((-change.expm1()).clamp(min=0.0))

    def distance(self, env_id: int | None, batch: Batch) -> float | None:
        """Mean |difference| of the logprobs of these two, at most; None if it is unknown."""
        change = self._since(env_id, batch)
        return None if change is None else at_most(change.abs())

    def _since(self, env_id: int | None, batch: Batch) -> Tensor | None:
        """[n] from the oldest weights that sampled the completions, or slightly older ones."""
        versions = [s.versions for s in batch.sequences if s.group.env_id == env_id]
        if None in versions:
            return None
        begun = min(pair[0] for pair in versions if pair is not None)
        if begun >= self._now:
            return torch.zeros(MIN_TOKENS)
        older = [one for one in self._samples[env_id] if one.version <= begun]
        if not older or older[-1].version.epoch != begun.epoch or len(older[-1].logp) < MIN_TOKENS:
            return None
        key = env_id, older[-1].version
        if key not in self._known:
            self._known[key] = self._change(older[-1])
        return self._known[key]

    def _change(self, sample: _Sample) -> Tensor:
        scaled = logits_of(self._policy, sample.tokens).cpu() / sample.temperature.unsqueeze(-1)
        ids = torch.cat([tokens[counted] for tokens, counted in sample.tokens])
        return scaled.log_softmax(-1).gather(-1, ids.unsqueeze(-1))[:, 0] - sample.logp


def at_most(values: Tensor) -> float:
    """Their mean and three standard errors."""
    error = values.std(correction=0) / len(values) ** 0.5
    return float(values.mean() + STANDARD_ERRORS * error)
