"""Computes the policy's logprobs of given tokens, and creates token sequences for checks.

Legend: B sequences, T positions after the causal shift, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from grpo_trainer.data.collate import MicroBatch
from grpo_trainer.model.policy import (
    CausalLM,
    base_model,
    device_of,
    text_config_of,
    uncompiled,
    vocabulary_of,
)
from grpo_trainer.ranks import Ranks

PROBE_LENGTH = 32
KERNELS = ("sdpa", "eager")
"""Two ways in which transformers computes attention."""
ONLY_EAGER = ("attn_logit_softcapping",)
"""Options of a model's configuration that transformers' sdpa ignores, as those of Gemma 2."""
KERNEL_FACTOR = 4.0
"""Server and trainer differ in all layers, the two kernels in attention alone. Measured: the
distance of a bfloat16 model from its float32 computation is 0.8 to 2.6 times that of the kernels,
for 1, 2 and 135 million parameters."""
LEAST_TOLERANCE: dict[torch.dtype, float] = {torch.float32: 2e-4, torch.bfloat16: 0.02}
"""For small models, whose noise differs much from one sequence to the next."""
DEFAULT_TOLERANCE = 0.05
_tolerances: WeakKeyDictionary[CausalLM, float] = WeakKeyDictionary()
GPU_FLOAT32_TOLERANCE = 0.01
"""On a GPU, vLLM's attention multiplies float32 as TF32, with 10 bits of mantissa. Not measured."""


class TokenValues(NamedTuple):
    """What the policy says of each target, at the temperature that sampled it."""

    logp: Tensor  # float32
    entropy: Tensor  # float32, in nats: of the distribution from which the target was sampled
    above: Tensor  # float32, probability of all tokens above the target; NaN if not computed


def token_values(
    policy: CausalLM, inputs: Tensor, targets: Tensor, temperature: Tensor
) -> TokenValues:
    """[B, T] logprob and entropy of each target.

    This is the plain way, with which faster ones are compared. Padding is on the right and
    attention is causal, so no attention mask is needed.

    Args:
        inputs: [B, T] token ids
        targets: [B, T] the tokens one position later
        temperature: [B]
    """
    with uncompiled():
        logits = policy(input_ids=inputs, use_cache=False).logits  # [B, T, V]
    return values_of(logits.float() / temperature.view(-1, 1, 1), targets)


def values_of(scaled: Tensor, targets: Tensor, differentiates_entropy: bool = False) -> TokenValues:
    """[...] logprob and entropy of each target.

    Args:
        scaled: [..., V] float32, logits divided by the temperature
        targets: [...] int64
        differentiates_entropy: store what the entropy's gradient needs
    """
    logps = scaled.log_softmax(-1)
    logp = logps.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(differentiates_entropy and torch.is_grad_enabled()):
        entropy = -torch.linalg.vecdot(logps.exp(), logps)
    return TokenValues(logp, entropy, torch.full_like(logp.detach(), torch.nan))


@torch.no_grad()
def probability_above(scaled: Tensor, targets: Tensor) -> Tensor:
    """[K] probability of all tokens that are more probable than the target.

    Args:
        scaled: [K, V] logits divided by the temperature
        targets: [K]
    """
    own = scaled.gather(-1, targets.unsqueeze(-1))
    return torch.where(scaled > own, scaled.softmax(-1), 0.0).sum(-1)


@torch.no_grad()
def logprobs_of(policy: CausalLM, token_ids: list[int]) -> Tensor:
    """The policy's logprobs of token_ids[1:] at temperature 1: [T] → [T-1]"""
    device = device_of(policy)
    ids = torch.tensor([token_ids], device=device)
    one = torch.ones(1, device=device)
    return token_values(policy, ids[:, :-1], ids[:, 1:], one).logp[0].cpu()


def tolerance_of(policy: CausalLM) -> float:
    """Allowed mean |difference| between two computations with the policy's weights.

    A multiple of the difference between two attention kernels, so it grows with the model's depth
    and with the rounding of its data type. It is computed once for each policy, before a compiler
    changes the layers.
    """
    if policy not in _tolerances:
        weights = next(policy.parameters())
        least = LEAST_TOLERANCE.get(weights.dtype, DEFAULT_TOLERANCE)
        if weights.is_cuda and weights.dtype == torch.float32:
            least = GPU_FLOAT32_TOLERANCE
        _tolerances[policy] = max(least, KERNEL_FACTOR * kernel_noise(policy))
    return _tolerances[policy]


def kernel_noise(policy: CausalLM, tokens: Sequence[int] = ()) -> float:
    """Mean |difference| of the logprobs of some tokens between two attention kernels, in nats; 0
    if only one of them is right for the model. Args: tokens: without: the probe's"""
    model = base_model(policy)
    config = text_config_of(model)
    if any(getattr(config, name, None) for name in ONLY_EAGER):
        return 0.0
    used = config._attn_implementation
    ids, found = [*(tokens or probe_tokens(vocabulary_of(model)))], []
    try:
        for kernel in KERNELS:
            model.set_attn_implementation(kernel)
            found.append(logprobs_of(policy, ids))
    except ValueError:  # transformers names the kernels that the model has
        return 0.0
    finally:
        model.set_attn_implementation(used)
    return float((found[0] - found[1]).abs().mean())


def probe_tokens(vocabulary: int, length: int = PROBE_LENGTH) -> list[int]:
    """A fixed sequence spread over the vocabulary: [length]"""
    generator = torch.Generator().manual_seed(20240229)
    tokens: list[int] = torch.randint(vocabulary, (length,), generator=generator).tolist()
    return tokens


@torch.no_grad()
def sampled_tokens(policy: CausalLM, length: int = PROBE_LENGTH) -> list[int]:
    """A sequence that the policy samples at temperature 1, the same one each time: [length]

    Improbable tokens would not do: computations differ on them far more than on trained tokens. All
    calls have one shape; tokens after a position do not affect it.
    """
    device, generator = device_of(policy), torch.Generator().manual_seed(20240229)
    tokens = torch.zeros(1, length, dtype=torch.long, device=device)
    tokens[0, 0] = probe_tokens(vocabulary_of(policy), 1)[0]
    for position in range(1, length):
        with uncompiled():
            answer = policy(input_ids=tokens, use_cache=False).logits  # [1, T, V]
        logits = answer[0, position - 1].float().cpu()
        noise = torch.empty_like(logits).exponential_(generator=generator)
        tokens[0, position] = (logits - noise.log()).argmax()  # sampling by the Gumbel-max trick
    found: list[int] = tokens[0].tolist()
    return found


def values_of_all(
    seen: Sequence[TokenValues], micro_batches: Sequence[MicroBatch], ranks: Ranks
) -> list[TokenValues]:
    """The values of all micro-batches. Args: seen: those of this rank's portion"""
    if ranks.count == 1:
        return [*seen]
    width = len(TokenValues._fields)
    flat = [torch.cat([value.flatten() for value in values]) for values in seen]
    found = ranks.joined(flat, [width * micro.inputs.numel() for micro in micro_batches])
    pairs = zip(found, micro_batches, strict=True)
    return [TokenValues(*part.view(width, *micro.inputs.shape)) for part, micro in pairs]
