"""Checks that the server serves the trainer's weights: compares logprobs of server and trainer.

The first check, before any update, measures the rounding noise: how far two computations with equal
weights differ. Later checks allow a multiple of that noise. A check is conclusive only if the
update moved the logprobs further than the noise, so this movement is measured too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import structlog
import torch
from torch import Tensor

from grpo_core.clients.inference import Completion
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.model.adapter import adapted_layers, adapter_scaled, without_dropout
from grpo_trainer.model.logprobs import (
    PROBE_LENGTH,
    kernel_noise,
    logprobs_of,
    probe_tokens,
    sampled_tokens,
    tolerance_of,
)
from grpo_trainer.model.policy import CausalLM, vocabulary_of
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.token_table import mean_distance

log = structlog.get_logger()

MISMATCH = "LogProb Alignment: MISMATCH!"
START_FACTOR = 2.0
"""If the first difference exceeds the tolerance by this factor, the weights are not equal."""
NOISE_FACTOR = 4.0
"""Later differences may be this many times the noise. It grows with training, in bfloat16 up to
eight times in 400 steps of the tiny model, so a larger difference makes the check measure it anew,
as that of two attention kernels. Measured in 127 checks: at most 3 times that."""
SAMPLED_TOKENS = 4
"""Each takes a pass of the engine, which meanwhile samples for others: with SmolLM2-135M on one
core 0.1 s. Cached keys and values of other weights change the first token's logprob already."""
DEFAULT_BLOCK = 16
LARGEST_BLOCK = 32
"""Tokens of a block of the KV cache, if the server does not name them: usual, and at most."""
MIN_PROMPT = 2
FAR_BETTER = 4.0
"""If other weights explain the served logprobs this many times better, the server serves those.
This finds small differences too: in bfloat16 a small update is below the tolerance, but far above
the noise."""
OTHER_SCALES = (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0, 0.0625)
"""Typical mistakes: lora_alpha and r exchanged, or another default."""


class Server(Protocol):
    """The requests that the check sends to the server. Both wait while it restarts."""

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """[T] token ids → [T-1] logprobs at temperature 1."""

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        """Sample exactly `max_tokens` tokens at temperature 1."""


@dataclass(frozen=True)
class Alignment:
    """server's - trainer's logprob| over the check's fixed tokens, in nats.

    `moved`: mean |change| of the trainer's logprobs since the last conclusive check. If it is near
    the noise, a server that still serves the previous weights would pass too. `previous`: mean
    |server's - trainer's logprob at that check|. `sampled_mean`: the mean over tokens that the
    server sampled for the check, if any.

    Example, after an update that the server serves: `Alignment(mean=1e-6, max=3e-6, moved=0.01,
    previous=0.01, sampled_mean=2e-6)`. If it still served the earlier weights, `mean` would be 0.01
    and `previous` 1e-6.
    """

    mean: float
    max: float
    moved: float
    previous: float
    sampled_mean: float | None = None

    @property
    def is_conclusive(self) -> bool:
        """Whether the check would have detected that the server serves the weights of the previous
        check. Until it would, later checks compare with the same one, so small steps add up."""
        return self.moved > FAR_BETTER * self.mean


@dataclass
class Bound:
    """The tolerance for the mean |difference| between the server's and the trainer's logprobs.

    Args:
        floor: `tolerance_of` the policy
        noise: the difference before any training; None if it was not measured
        learns: nothing is trained yet, so the next check measures the noise
    """

    floor: float
    noise: float | None = None
    learns: bool = False

    @property
    def value(self) -> float:
        if self.learns:
            return START_FACTOR * self.floor
        return max(self.floor, NOISE_FACTOR * (self.noise or 0.0))

    def learn(self, noise: float) -> None:
        """Set the noise from the first check. Later differences may come from training."""
        if self.learns:
            self.noise, self.learns = noise, False


@dataclass(frozen=True)
class ProbeLengths:
    """Lengths in tokens. `prompt` is one more than a block of the KV cache, so that a whole block
    can come from the cache. It is shorter if the server's maximum length requires it."""

    fixed: int = PROBE_LENGTH
    prompt: int = LARGEST_BLOCK + 1
    sampled: int = SAMPLED_TOKENS

    @classmethod
    def fitting(cls, kv_block_size: int | None, max_model_len: int | None) -> ProbeLengths:
        block = kv_block_size or DEFAULT_BLOCK
        longest = max_model_len or 2 * PROBE_LENGTH + block
        sampled = min(SAMPLED_TOKENS, longest // 2)
        prompt = min(block + 1, max(MIN_PROMPT, longest - sampled))
        # a request for the prompt's logprobs also samples one token
        return cls(max(MIN_PROMPT, min(PROBE_LENGTH, longest - 1)), prompt, sampled)


class PublicationCheck:
    """Compares both sides' logprobs of fixed tokens, and of a few tokens that the server samples:
    rollouts are not compared if their sampling was reshaped, for example by top_p.

    Create it before training starts: it remembers the starting policy's logprobs, to recognise a
    server that still serves these weights.

    Args:
        policy: the trainer's, without dropout
        server: receives the requests
        bound: the tolerance for the mean |difference|; it learns the noise from the first check
    """

    def __init__(
        self,
        policy: CausalLM,
        server: Server,
        lengths: ProbeLengths | None = None,
        bound: Bound | None = None,
    ) -> None:
        lengths = lengths or ProbeLengths()
        self._policy = policy
        self._server = server
        self.bound = bound or Bound(tolerance_of(policy), learns=True)
        self._tokens = sampled_tokens(policy, lengths.fixed)
        self._prompt = probe_tokens(vocabulary_of(policy), lengths.prompt)
        self._sampled = lengths.sampled
        self._base = self._previous = self._logprobs()  # [T-1]

    def prime(self) -> None:
        """Make the server cache the prompt under the old weights, just before a publication. If the
        cache outlives those weights, the check finds it."""
        self._server.sample(self._prompt, max_tokens=1)

    def measure(self) -> Alignment:
        """Of the fixed tokens alone; judges nothing."""
        ours = self._logprobs()
        served = torch.tensor(self._server.served_logprobs(self._tokens))
        alignment = self._alignment(ours, served)
        if alignment.is_conclusive:
            self._previous = ours
        return alignment

    def require(
        self,
        version: PolicyVersion | None,
        label: str,
        servers: Mapping[str, Server] = MappingProxyType({}),
    ) -> Alignment:
        """Returns the alignment of the server that is furthest off.

        Args:
            version: the published policy version, which the server must name; None: it need not
            label: names the moment in the error message
            servers: those to check instead of `server`, by their names in messages

        Raises:
            ServedWeightsDiffer: a server does not serve these weights; names the likely cause.
        """
        ours = self._logprobs()
        found = [
            self._required(name, server, ours, version, label)
            for name, server in (servers or {"the server": self._server}).items()
        ]
        worst = max(found, key=lambda alignment: alignment.mean)
        self.bound.learn(max(max(one.mean, one.sampled_mean or 0.0) for one in found))
        if worst.is_conclusive:
            self._previous = ours
        else:
            log.info(
                "alignment.inconclusive",
                reason="since the last conclusive check, the trainer's logprobs changed by at most "
                f"{FAR_BETTER:g} times the rounding noise, so a server that still serves the "
                "earlier weights would pass this check",
                moved=worst.moved,
                noise=worst.mean,
            )
        return worst

    def _required(
        self, name: str, server: Server, ours: Tensor, version: PolicyVersion | None, label: str
    ) -> Alignment:
        """Of one server. Raises the error of `require`."""
        served = torch.tensor(server.served_logprobs(self._tokens))
        completion = server.sample(self._prompt, max_tokens=self._sampled)
        continued = logprobs_of(self._policy, [*self._prompt, *completion.token_ids])
        logged = torch.tensor(completion.logprobs)
        sampled_mean = mean_distance(logged, continued[len(self._prompt) - 1 :])
        alignment = self._alignment(ours, served, sampled_mean)
        problems = self._problems(alignment, sampled_mean, served)
        named = {completion.first_version, completion.last_version}
        if version is not None and named != {version}:
            names = ", ".join(str(tuple(v)) for v in sorted(named))
            problems.append(
                f"the server's response names policy version {names}; if another trainer "
                "publishes to this server, stop that trainer"
            )
        if problems:
            but = f"{name} does not serve the trainer's weights: "
            if version is not None:
                but = f"policy version {tuple(version)} is published, but " + but
            raise ServedWeightsDiffer(f"{MISMATCH} {label}, {but}" + "; ".join(problems))
        return alignment

    def _logprobs(self) -> Tensor:
        """[T-1] the trainer's logprobs of the fixed tokens."""
        return logprobs_of(self._policy, self._tokens)

    def _alignment(
        self, ours: Tensor, served: Tensor, sampled_mean: float | None = None
    ) -> Alignment:
        return Alignment(
            mean=mean_distance(served, ours),
            max=float((served - ours).abs().max()),
            moved=mean_distance(ours, self._previous),
            previous=mean_distance(served, self._previous),
            sampled_mean=sampled_mean,
        )

    def _problems(self, alignment: Alignment, sampled_mean: float, served: Tensor) -> list[str]:
        mean, tolerance = alignment.mean, self.bound.value
        if max(mean, sampled_mean) > tolerance:
            with without_dropout(self._policy):
                noise = kernel_noise(self._policy, self._tokens)
            tolerance = max(tolerance, NOISE_FACTOR * noise)
            log.info("alignment.noise_measured", mean=mean, sampled=sampled_mean, noise=noise)
        other = min(mean_distance(served, self._base), alignment.previous)
        if not mean <= tolerance or FAR_BETTER * other < mean:
            return [
                f"the server's logprobs of fixed tokens differ from the trainer's by {mean:.2g} on "
                f"average, {alignment.max:.2g} at most (tolerance {tolerance:.2g}). Likely cause: "
                f"{self._cause(served, alignment)}"
            ]
        if not sampled_mean <= tolerance:
            return [
                "the logprobs of tokens that the server samples differ from the trainer's by "
                f"{sampled_mean:.4f} on average (tolerance {tolerance:.2g}), although the logprobs "
                f"of fixed tokens agree ({mean:.2g}). Likely cause: keys and values of other "
                "weights are still in the server's KV cache; restart the server"
            ]
        return []

    def _cause(self, served: Tensor, alignment: Alignment) -> str:
        base, previous, mean = mean_distance(served, self._base), alignment.previous, alignment.mean
        with without_dropout(self._policy):
            if FAR_BETTER * mean_distance(served, self._logprobs()) < mean:
                return "dropout is on in the trainer's policy, which the check compares"
        for layer in adapted_layers(self._policy):
            with adapter_scaled(self._policy, 0.0, layer):
                without = mean_distance(served, self._logprobs())
            if FAR_BETTER * without < min(base, previous, mean):
                return (
                    f"the server does not apply the adapter's part of {layer}; check that the "
                    "published adapter contains the tensors of this layer"
                )
        if FAR_BETTER * base < mean and base <= previous:
            return "the server serves the model that it was started with, without any training"
        if FAR_BETTER * previous < mean:
            return "the server still serves the weights of the previous publication"
        for factor in OTHER_SCALES:
            with adapter_scaled(self._policy, factor):
                scaled = mean_distance(served, self._logprobs())
            if FAR_BETTER * scaled < mean:
                return (
                    f"the server multiplies the adapter by {factor:g} times the trainer's scale; "
                    "check lora_alpha and r in the published adapter_config.json"
                )
        return (
            "the server serves weights of another run, or was not started with the trainer's "
            "--model (mean difference to the untrained model of --model: "
            f"{base:.2g}, to the previous publication: {previous:.2g}). Stop other processes that "
            "publish to this server, then restart server and trainer"
        )


def require_written(optimizer: MasterOptimizer, step: int) -> None:
    """Check that the shared memory contains the update. A comparison of logprobs cannot show this,
    because both sides read the same memory.

    Raises:
        ServedWeightsDiffer: a parameter does not hold the optimizer's result.
    """
    unwritten = optimizer.unwritten_parameters()
    if unwritten:
        raise ServedWeightsDiffer(
            f"{MISMATCH} After step {step}, {unwritten} of {len(optimizer.masters)} "
            "parameters in shared memory differ from the optimizer's result, so the server "
            "serves wrong weights. The update was not written, or another process overwrote it. "
            "Stop all other processes that write to the shared memory, then start again"
        )
