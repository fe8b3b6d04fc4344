"""From scored groups, as they come over the wire, to tensors. The only place that knows both.

Legend: B sequences of a micro-batch, T positions after the causal shift (longest sequence - 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from grpo_core.wire import MASKED, PROMPT_LOGPROB, PolicyVersion, RolloutFacts, ScoredGroup
from grpo_trainer.advantage import group_advantages
from grpo_trainer.errors import NO_INFERENCE_LOGPROBS, UnusableGroup

V = TypeVar("V")

NEUTRAL_SAMPLING: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "structured_outputs": (),
}
"""Values under which the logged log-probabilities are those of softmax(logits / temperature)."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads."""

    inputs: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64
    behaviour_logp: Tensor  # [B, T] float32, 1.0 where not sampled
    token_weight: Tensor  # [B, T] float32, sums to (sequences with trained tokens) / batch size
    advantages: Tensor  # [B] float32
    temperature: Tensor  # [B] float32


@dataclass(frozen=True)
class BatchFacts:
    """What the metrics say about the data itself."""

    sequences: int
    tokens: int
    """Prompt and completion tokens, padding not counted."""
    reward_mean: float
    zero_variance_fraction: float
    """Share of groups whose scores are all equal: they teach nothing."""
    truncated_sequences: int
    first_versions: list[PolicyVersion]
    """The weights that sampled each completion's first token, where known."""
    generate_s: float
    """Mean seconds of the groups' generation requests; 0 where the environment does not say."""


@dataclass(frozen=True)
class Batch:
    micro_batches: list[MicroBatch]
    facts: BatchFacts


@dataclass(frozen=True)
class CollationLimits:
    """`seq_len` in tokens, `micro_batch_size` in sequences; token ids lie below `vocab_size`."""

    seq_len: int
    micro_batch_size: int
    vocab_size: int


@dataclass(frozen=True)
class _Row:
    """One sequence, shifted: position t predicts targets[t]."""

    inputs: list[int]
    targets: list[int]
    trained: list[bool]
    behaviour_logp: list[float]
    advantage: float
    temperature: float


def collate(groups: Sequence[ScoredGroup], limits: CollationLimits) -> Batch:
    """Build one step's micro-batches.

    Sequences longer than `seq_len` tokens are cut at the end. Every sequence weighs the same and
    so does every trained token inside it: token_weight = 1 / (its trained tokens * all sequences).

    Raises:
        UnusableGroup: a group without inference_logprobs, sampled from another distribution than
            the one its logprobs can be compared with, with masks that do not fit its tokens, or
            with tokens that the policy does not know.
    """
    rows = [row for i, group in enumerate(groups) for row in _rows(i, group, limits)]
    size = limits.micro_batch_size
    micro_batches = [
        _micro_batch(rows[start : start + size], len(rows)) for start in range(0, len(rows), size)
    ]
    return Batch(micro_batches, _facts(groups, limits.seq_len))


def _rows(index: int, group: ScoredGroup, limits: CollationLimits) -> list[_Row]:
    if not group.inference_logprobs:
        raise UnusableGroup(NO_INFERENCE_LOGPROBS.format(index=index, env_id=group.env_id))
    _check_sampling(index, group)
    _check_tokens(index, group, limits.vocab_size)
    advantages = group_advantages(torch.tensor(group.scores)).tolist()
    return [
        _row(index, i, group, group.inference_logprobs[i], advantages[i], limits.seq_len)
        for i in range(group.size)
    ]


def _row(
    index: int,
    i: int,
    group: ScoredGroup,
    logprobs: list[float],
    advantage: float,
    seq_len: int,
) -> _Row:
    tokens, masks = group.tokens[i][:seq_len], group.masks[i][:seq_len]
    trained = [mask != MASKED for mask in masks[1:]]
    behaviour = logprobs[1:seq_len]
    if any(t and logp > 0.0 for t, logp in zip(trained, behaviour, strict=True)):
        raise UnusableGroup(
            f"group {index}, sequence {i}: inference_logprobs above 0 at trained positions; the "
            f"prompt's placeholder ({PROMPT_LOGPROB}) there means that masks and logprobs are "
            "shifted against each other"
        )
    override = group.overrides[i] if group.overrides else {}
    return _Row(
        inputs=tokens[:-1],
        targets=tokens[1:],
        trained=trained,
        behaviour_logp=behaviour,
        advantage=0.0 if override.get("set_advantage_to_zero") else advantage,
        temperature=_temperature(index, group, override),
    )


def _temperature(index: int, group: ScoredGroup, override: dict[str, object]) -> float:
    """From the sequence's overrides, else the generation parameters, else the group's overrides."""
    sources = (override, group.generation_params or {}, group.group_overrides or {})
    found = next((s["temperature"] for s in sources if s.get("temperature") is not None), 1.0)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise UnusableGroup(
            f"group {index}: temperature {found!r}; the importance ratio needs completions that "
            "were sampled at a temperature above 0"
        )
    return float(found)


def _check_sampling(index: int, group: ScoredGroup) -> None:
    sources = [group.generation_params or {}, group.group_overrides or {}, *(group.overrides or [])]
    truncating = {
        f"{name}={source[name]}"
        for source in sources
        for name, neutral in NEUTRAL_SAMPLING.items()
        if source.get(name) is not None and source[name] not in neutral
    }
    if truncating:
        raise UnusableGroup(
            f"group {index}: sampled with {', '.join(sorted(truncating))}, which renormalises the "
            "logged probabilities; sample with the temperature alone"
        )


def _check_tokens(index: int, group: ScoredGroup, vocab_size: int) -> None:
    for i, (tokens, masks) in enumerate(zip(group.tokens, group.masks, strict=True)):
        if max(tokens) >= vocab_size:
            raise UnusableGroup(
                f"group {index}, sequence {i}: token {max(tokens)}, but the policy knows "
                f"{vocab_size}; environment and trainer use different tokenizers"
            )
        if any(m not in (MASKED, t) for m, t in zip(masks, tokens, strict=True)):
            raise UnusableGroup(
                f"group {index}, sequence {i}: a mask is neither {MASKED} nor its own token; "
                "masks and tokens are shifted against each other"
            )


def _micro_batch(rows: list[_Row], batch_sequences: int) -> MicroBatch:
    width = max(1, *(len(row.inputs) for row in rows))
    trained = torch.tensor([_padded(row.trained, width, False) for row in rows])  # [B, T]
    per_sequence = trained.sum(-1, keepdim=True).clamp_min(1)  # [B, 1]
    return MicroBatch(
        inputs=torch.tensor([_padded(row.inputs, width, 0) for row in rows]),
        targets=torch.tensor([_padded(row.targets, width, 0) for row in rows]),
        behaviour_logp=torch.tensor(
            [_padded(row.behaviour_logp, width, PROMPT_LOGPROB) for row in rows]
        ),
        token_weight=trained.float() / per_sequence / batch_sequences,
        advantages=torch.tensor([row.advantage for row in rows]),
        temperature=torch.tensor([row.temperature for row in rows]),
    )


def _padded(values: list[V], width: int, fill: V) -> list[V]:
    return values + [fill] * (width - len(values))


def _facts(groups: Sequence[ScoredGroup], seq_len: int) -> BatchFacts:
    lengths = [len(tokens) for group in groups for tokens in group.tokens]
    facts = [RolloutFacts.of(group) for group in groups]
    seconds = [f.generation_seconds for f in facts if f.generation_seconds is not None]
    return BatchFacts(
        sequences=len(lengths),
        tokens=sum(min(length, seq_len) for length in lengths),
        reward_mean=_reward_mean(groups, facts),
        zero_variance_fraction=sum(len(set(g.scores)) == 1 for g in groups) / len(groups),
        truncated_sequences=sum(length > seq_len for length in lengths),
        first_versions=[PolicyVersion(*first) for f in facts for first, _ in f.policy_version],
        generate_s=sum(seconds) / len(seconds) if seconds else 0.0,
    )


def _reward_mean(groups: Sequence[ScoredGroup], facts: Sequence[RolloutFacts]) -> float:
    """Over every graded completion where the environment counts those it dropped, else over the
    scores of the batch."""
    samples = [f.reward_sample for f in facts if f.reward_sample is not None]
    if len(samples) == len(groups):
        return sum(s.sum for s in samples) / sum(s.count for s in samples)
    scores = [score for group in groups for score in group.scores]
    return sum(scores) / len(scores)
