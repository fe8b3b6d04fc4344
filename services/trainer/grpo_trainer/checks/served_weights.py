"""Checks that the server serves the trainer's weights: compares logprobs of server and trainer.

The first check, before any update, measures the rounding noise: how far two computations with equal
weights differ. Later checks allow a multiple of that noise. A check is conclusive only if the
update moved the logprobs further than the noise, so this movement is measured too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch
from torch import Tensor

from grpo_core.clients.inference import Completion
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.model.adapter import adapter_scaled, without_dropout
from grpo_trainer.model.logprobs import (
    PROBE_LENGTH,
    logprobs_of,
    probe_tokens,
    sampled_tokens,
    tolerance_of,
)
from grpo_trainer.model.policy import CausalLM, vocabulary_of
from grpo_trainer.optim.master_optimizer import MasterOptimizer

log = structlog.get_logger()

MISMATCH = "LogProb Alignment: MISMATCH!"
START_FACTOR = 2.0
"""If the first difference exceeds the tolerance by this factor, the weights are not equal."""
NOISE_FACTOR = 4.0
"""Later differences may be this many times the noise, which grows as training makes the probe's
tokens less likely."""
SAMPLED_TOKENS = 4
"""Each takes a pass of the engine, which meanwhile samples for others: with SmolLM2-135M on one
core 0.1 s. Cached keys and values of other weights change the first token's logprob already."""
SAMPLED_PROMPT = 33
"""One token more than a block of the KV cache (16 or 32), so that a block can come from there."""
FAR_BETTER = 4.0
"""If other weights explain the served logprobs this many times better, the server serves those.
This finds small differences too: in bfloat16 a small update is below the tolerance, but far above
the noise."""

ServedLogprobs = Callable[[list[int]], list[float]]
"""[T] token ids → [T-1] logprobs of the server at temperature 1."""


@dataclass(frozen=True)
class Alignment:
    """server's - trainer's logprob| over the probe's tokens.

    `moved`: mean |change| of the trainer's logprobs since the last conclusive probe. If it is near
    the noise, a server that still serves the previous weights would pass too. `previous`: mean
    |server's - trainer's logprob at that probe|. `sampled_mean`: the mean over tokens that the
    server sampled for the check, if any.
    """

    mean: float
    max: float
    moved: float
    previous: float
    sampled_mean: float | None = None

    @classmethod
    def of(
        cls, served: Tensor, ours: Tensor, previous: Tensor, sampled_mean: float | None = None
    ) -> Alignment:
        """Args: logprobs of the same tokens, [T-1] each; previous: ours at the previous probe."""
        return cls(
            mean=mean_distance(served, ours),
            max=float((served - ours).abs().max()),
            moved=mean_distance(ours, previous),
            previous=mean_distance(served, previous),
            sampled_mean=sampled_mean,
        )

    @property
    def is_conclusive(self) -> bool:
        """Whether the check would have detected that the server serves the weights of the previous
        probe. Until it would, later probes compare with the same one, so small steps add up."""
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


class AlignmentProbe:
    """Compares both sides' logprobs of fixed tokens at temperature 1.

    Create it before the first update, so that the first measurement shows how far the weights
    moved.

    Args: bound: the tolerance; it learns the noise from the first check
    """

    def __init__(self, policy: CausalLM, bound: Bound | None = None) -> None:
        self._policy = policy
        self._token_ids = sampled_tokens(policy)
        self._previous = logprobs_of(policy, self._token_ids)
        self.bound = bound or Bound(tolerance_of(policy), learns=True)

    def require(self, served_logprobs: ServedLogprobs, label: str) -> Alignment:
        """Args: label: names the moment in the error message.

        Raises:
            ServedWeightsDiffer: the server does not serve the policy's weights.
        """
        found = self.measure(served_logprobs)
        require_alignment(found, self.bound.value, label)
        self.bound.learn(found.mean)
        return found

    def measure(self, served_logprobs: ServedLogprobs) -> Alignment:
        ours = logprobs_of(self._policy, self._token_ids)  # [T-1]
        found = Alignment.of(torch.tensor(served_logprobs(self._token_ids)), ours, self._previous)
        if found.is_conclusive:
            self._previous = ours
        return found


Sample = Callable[[list[int], int], Completion]
"""Token ids of a prompt, number of tokens → tokens that the server samples at temperature 1."""


def sampled_difference(policy: CausalLM, prompt: list[int], completion: Completion) -> float:
    """Mean |server's - trainer's logprob| of the sampled tokens."""
    ours = logprobs_of(policy, [*prompt, *completion.token_ids])[len(prompt) - 1 :]  # [K]
    return mean_distance(torch.tensor(completion.logprobs), ours)


@dataclass(frozen=True)
class SharedMemoryCheck:
    """Checks the server at the start, after the first update and after every `every_steps`-th, if
    both sides share the weights' memory. The other modes check every publication
    (`PublicationCheck`).

    It also compares a few tokens that the server samples, because rollouts are not compared if
    their sampling was reshaped, for example by top_p.
    """

    probe: AlignmentProbe
    policy: CausalLM
    optimizer: MasterOptimizer
    served_logprobs: ServedLogprobs
    sample: Sample
    every_steps: int

    def at_start(self) -> None:
        """Raises `ServedWeightsDiffer`: the server serves other weights."""
        self._require("Before the first step")

    def _require(self, label: str) -> Alignment:
        alignment = self.probe.measure(self.served_logprobs)
        require_alignment(alignment, self.probe.bound.value, label)
        prompt = probe_tokens(vocabulary_of(self.policy), SAMPLED_PROMPT)
        off = sampled_difference(self.policy, prompt, self.sample(prompt, SAMPLED_TOKENS))
        if not off <= self.probe.bound.value:
            raise ServedWeightsDiffer(
                f"{MISMATCH} {label}, the logprobs of tokens that the server samples differ from "
                f"the trainer's by {off:.4f} on average (tolerance {self.probe.bound.value:.2g}), "
                f"although the logprobs of fixed tokens agree ({alignment.mean:.2g}). Likely "
                "cause: keys and values of other weights are still in the server's KV cache; "
                "restart the server"
            )
        self.probe.bound.learn(max(alignment.mean, off))
        return alignment

    def after_step(self, step: int) -> Alignment | None:
        """None if no check is due after the step with this index.

        Raises:
            ServedWeightsDiffer: the server serves other weights, or the update was not written.
        """
        if step != 0 and (step + 1) % self.every_steps != 0:
            return None
        require_written(self.optimizer, step)
        alignment = self._require(f"After step {step}")
        log_if_inconclusive(alignment)
        return alignment


def mean_distance(some: Tensor, others: Tensor) -> float:
    return float((some - others).abs().mean())


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
            "serves wrong weights. The update was not written, or another process overwrote the "
            "update. Stop all other processes that write to the shared memory, then start the "
            "trainer again"
        )


def require_alignment(alignment: Alignment, tolerance: float, label: str) -> None:
    """Args: label: names the moment in the error message.

    Raises:
        ServedWeightsDiffer: the difference exceeds the tolerance, or the weights of the previous
            probe fit far better.
    """
    is_previous = FAR_BETTER * alignment.previous < alignment.mean
    if is_previous or not alignment.mean <= tolerance:
        raise ServedWeightsDiffer(
            f"{MISMATCH} {label}, the server does not serve the trainer's weights. The server's "
            f"logprobs differ from the trainer's current logprobs by {alignment.mean:.2g} on "
            f"average (tolerance {tolerance:.2g}) and by {alignment.max:.2g} at most. The server's "
            "logprobs differ from the trainer's logprobs at an earlier check by "
            f"{alignment.previous:.2g} on average. Stop other processes that publish to this "
            "server, then restart server and trainer"
        )


def log_if_inconclusive(alignment: Alignment) -> None:
    if not alignment.is_conclusive:
        log.info(
            "alignment.inconclusive",
            reason="since the last conclusive check, the trainer's logprobs changed by at most "
            f"{FAR_BETTER:g} times the rounding noise, so a server that still serves the earlier "
            "weights would pass this check",
            moved=alignment.moved,
            noise=alignment.mean,
        )


DEFAULT_BLOCK = 16
MIN_PROMPT = 2
OTHER_SCALES = (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0, 0.0625)
"""Typical mistakes: lora_alpha and r exchanged, or another default."""


class Server(Protocol):
    """The requests that the check sends to the server. Both wait while it restarts."""

    def served_logprobs(self, token_ids: list[int]) -> list[float]: ...

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        """Sample exactly `max_tokens` tokens at temperature 1."""


@dataclass(frozen=True)
class ProbeLengths:
    """Lengths in tokens. `prompt` is one more than a block of the KV cache, so that a whole block
    can come from the cache. It is shorter if the server's maximum length requires it."""

    fixed: int
    prompt: int
    sampled: int

    @classmethod
    def fitting(cls, kv_block_size: int | None, max_model_len: int | None) -> ProbeLengths:
        longest = max_model_len or 2 * PROBE_LENGTH + (kv_block_size or DEFAULT_BLOCK)
        sampled = min(SAMPLED_TOKENS, longest // 2)
        room = max(MIN_PROMPT, longest - sampled)
        prompt = min((kv_block_size or DEFAULT_BLOCK) + 1, room)
        # a request for the prompt's logprobs also samples one token
        return cls(max(MIN_PROMPT, min(PROBE_LENGTH, longest - 1)), prompt, sampled)


class PublicationCheck:
    """Create it before training starts: it remembers the starting policy's logprobs, to recognise a
    server that still serves these weights.

    Args:
        policy: the trainer's, without dropout
        server: receives the requests

    `bound`: the tolerance for the mean |difference|; it learns the noise from the first publication
    """

    def __init__(self, policy: CausalLM, server: Server, lengths: ProbeLengths) -> None:
        self._policy = policy
        self._server = server
        self.bound = Bound(tolerance_of(policy), learns=True)
        self._tokens = sampled_tokens(policy, lengths.fixed)
        self._prompt = probe_tokens(vocabulary_of(policy), lengths.prompt)
        self._sampled = lengths.sampled
        self._base = self._previous = logprobs_of(policy, self._tokens)  # [T-1]

    def prime(self) -> None:
        """Make the server cache the prompt under the old weights, just before a publication. If the
        cache outlives those weights, the check finds it."""
        self._server.sample(self._prompt, max_tokens=1)

    def require(self, version: PolicyVersion, label: str) -> Alignment:
        """Args:
            version: the published policy version
            label: names the moment in the error message

        Raises:
            ServedWeightsDiffer: the server does not serve these weights; names the likely cause.
        """
        ours = logprobs_of(self._policy, self._tokens)
        served = torch.tensor(self._server.served_logprobs(self._tokens))
        completion = self._server.sample(self._prompt, max_tokens=self._sampled)
        sampled_off = sampled_difference(self._policy, self._prompt, completion)
        alignment = Alignment.of(served, ours, self._previous, sampled_off)
        named = {completion.first_version, completion.last_version}
        problems = self._problems(alignment, served, named, version)
        if problems:
            raise ServedWeightsDiffer(
                f"{MISMATCH} {label}, policy version {tuple(version)} is published, but "
                + "; ".join(problems)
            )
        if alignment.is_conclusive:
            self._previous = ours
        self.bound.learn(max(alignment.mean, alignment.sampled_mean or 0.0))
        log_if_inconclusive(alignment)
        return alignment

    def _problems(
        self,
        alignment: Alignment,
        served: Tensor,
        named: set[PolicyVersion],
        version: PolicyVersion,
    ) -> list[str]:
        problems = []
        other = min(mean_distance(served, self._base), alignment.previous)
        if not alignment.mean <= self.bound.value or FAR_BETTER * other < alignment.mean:
            problems.append(
                f"the server's logprobs of fixed tokens differ from the trainer's by "
                f"{alignment.mean:.2g} on average, {alignment.max:.2g} at most (tolerance "
                f"{self.bound.value:.2g}). Likely cause: {self._cause(served, alignment)}"
            )
        elif not (alignment.sampled_mean or 0.0) <= self.bound.value:
            problems.append(
                "the logprobs of tokens that the server samples differ from the trainer's by "
                f"{alignment.sampled_mean:.4f} on average (tolerance {self.bound.value:.2g}), "
                f"although the logprobs of fixed tokens agree ({alignment.mean:.2g}). Likely "
                "cause: keys and values of the previous weights are still in the server's KV cache"
            )
        if named != {version}:
            names = ", ".join(str(tuple(v)) for v in sorted(named))
            problems.append(
                f"the server's response names policy version {names}; if another trainer "
                "publishes to this server, stop that trainer"
            )
        return problems

    def _cause(self, served: Tensor, alignment: Alignment) -> str:
        base, previous, mean = mean_distance(served, self._base), alignment.previous, alignment.mean
        if FAR_BETTER * base < mean and base <= previous:
            return "the server serves the model that it was started with, without any training"
        if FAR_BETTER * previous < mean:
            return "the server still serves the weights of the previous publication"
        with without_dropout(self._policy):
            if FAR_BETTER * mean_distance(served, logprobs_of(self._policy, self._tokens)) < mean:
                return "dropout is on in the trainer's policy, which the check compares"
        for factor in OTHER_SCALES:
            if FAR_BETTER * self._distance_at_scale(served, factor) < mean:
                return (
                    f"the server multiplies the adapter by {factor:g} times the trainer's scale; "
                    "check lora_alpha and r in the published adapter_config.json"
                )
        return (
            "the server serves weights of another run, or was not started with the trainer's "
            "--model (mean difference to the untrained model of --model: "
            f"{base:.2g}, to the previous publication: {previous:.2g})"
        )

    def _distance_at_scale(self, served: Tensor, factor: float) -> float:
        with adapter_scaled(self._policy, factor):
            return mean_distance(served, logprobs_of(self._policy, self._tokens))
