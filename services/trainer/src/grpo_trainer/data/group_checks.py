"""What makes a scored group unusable for GRPO, and what is read from a usable one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_core.wire.fields import FLOAT32_MAX, MASKED, MIN_TEMPERATURE, PROMPT_LOGPROB
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup
from grpo_trainer.errors import NO_INFERENCE_LOGPROBS, UnusableGroup, UnusableReason

LOGPROB_SLACK = 1e-6
"""A probability of 1 may come back as a log-probability this far above 0: rounding."""

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
class GroupLimits:
    """`vocab_size`: token ids lie below it; `seq_len`: tokens to which sequences are cut."""

    vocab_size: int
    seq_len: int


@dataclass(frozen=True)
class UsableGroup:
    """A group that passed every check, with what the checks read from it.

    `temperatures`: one per sequence. `zero_advantage`: sequences whose advantage is set to zero.
    `version_bound`: where `facts` name no version, the newest that may have sampled it, if known.
    """

    group: ScoredGroup
    inference_logprobs: list[list[float]]
    temperatures: list[float]
    zero_advantage: list[bool]
    facts: RolloutFacts
    version_bound: PolicyVersion | None = None


def usable_group(index: int, group: ScoredGroup, limits: GroupLimits) -> UsableGroup:
    """Check one group; `index` is its place in the batch, for messages.

    Raises:
        UnusableGroup: no inference_logprobs, sampled from another distribution than the one its
            logprobs can be compared with, masks that do not fit its tokens or leave the prompt
            unmasked, nothing to train on, or tokens that the policy does not know.
    """
    if not group.inference_logprobs:
        message = NO_INFERENCE_LOGPROBS.format(index=index, env_id=group.env_id)
        raise UnusableGroup(UnusableReason.NO_LOGPROBS, message)
    _check_sampling(index, group)
    _check_tokens(index, group, limits.vocab_size)
    _check_masks(index, group)
    for i, (masks, logprobs) in enumerate(zip(group.masks, group.inference_logprobs, strict=True)):
        _check_logprobs(f"group {index}, sequence {i}", masks, logprobs)
    _check_prompts(index, group)
    _check_cut(index, group, limits.seq_len)
    overrides: list[dict[str, Any]] = group.overrides or [{}] * group.size
    return UsableGroup(
        group=group,
        inference_logprobs=group.inference_logprobs,
        temperatures=[_temperature(index, group, override) for override in overrides],
        zero_advantage=[bool(override.get("set_advantage_to_zero")) for override in overrides],
        facts=RolloutFacts.of(group),
    )


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
            UnusableReason.SAMPLING,
            f"group {index}: sampled with {', '.join(sorted(truncating))}, which renormalises the "
            "logged probabilities; sample with the temperature alone",
        )


def _check_tokens(index: int, group: ScoredGroup, vocab_size: int) -> None:
    for i, tokens in enumerate(group.tokens):
        if max(tokens) >= vocab_size:
            raise UnusableGroup(
                UnusableReason.UNKNOWN_TOKEN,
                f"group {index}, sequence {i}: token {max(tokens)}, but the policy knows "
                f"{vocab_size}; environment and trainer use different tokenizers",
            )


def _check_masks(index: int, group: ScoredGroup) -> None:
    for i, (tokens, masks) in enumerate(zip(group.tokens, group.masks, strict=True)):
        if any(m not in (MASKED, t) for m, t in zip(masks, tokens, strict=True)):
            raise UnusableGroup(
                UnusableReason.MASKS,
                f"group {index}, sequence {i}: a mask is neither {MASKED} nor its own token; "
                "masks and tokens are shifted against each other",
            )
    if not any(_trained_positions(masks) for masks in group.masks):
        raise UnusableGroup(
            UnusableReason.NOTHING_TRAINED,
            f"group {index}: every mask is {MASKED}, so there is nothing to train on; the mask of "
            "a completion's token is the token itself",
        )


def _check_cut(index: int, group: ScoredGroup, seq_len: int) -> None:
    first = min(positions[0] for m in group.masks if (positions := _trained_positions(m)))
    if first >= seq_len:
        raise UnusableGroup(
            UnusableReason.CUT_OFF,
            f"group {index}: the first trained token is number {first + 1}, and --seq-len "
            f"{seq_len} cuts it off; raise it, or have the environment make shorter prompts",
        )


def _check_logprobs(where: str, masks: list[int], logprobs: list[float]) -> None:
    trained = [logprobs[t] for t in _trained_positions(masks)]
    positive = [logp for logp in trained if logp > LOGPROB_SLACK]
    if positive:
        raise UnusableGroup(
            UnusableReason.POSITIVE_LOGPROBS,
            f"{where}: ref_logprobs avg {sum(positive) / len(positive):.3f} (should be negative!) "
            f"at {len(positive)} of {len(trained)} trained positions of inference_logprobs. The "
            f"prompt's placeholder ({PROMPT_LOGPROB}) there means that masks and logprobs are "
            "shifted against each other, or that the prompt is not masked",
        )


def _check_prompts(index: int, group: ScoredGroup) -> None:
    """The first token has nothing before it that could have predicted it: it is no completion."""
    unmasked = [i for i, masks in enumerate(group.masks) if masks[0] != MASKED]
    if unmasked:
        raise UnusableGroup(
            UnusableReason.PROMPT_TRAINED,
            f"group {index}: the first token of {len(unmasked)} of {group.size} sequences is "
            f"trained on, so the prompt is not masked; masks are {MASKED} at prompt positions",
        )


def _trained_positions(masks: list[int]) -> list[int]:
    """Without the first: nothing predicts it."""
    return [t for t in range(1, len(masks)) if masks[t] != MASKED]


def _temperature(index: int, group: ScoredGroup, override: dict[str, Any]) -> float:
    """From the sequence's overrides, else the generation parameters, else the group's overrides."""
    found = next(_given_temperatures(group, override), 1.0)
    if (
        isinstance(found, bool)
        or not isinstance(found, int | float)
        or not MIN_TEMPERATURE <= found <= FLOAT32_MAX
    ):
        raise UnusableGroup(
            UnusableReason.TEMPERATURE,
            f"group {index}: temperature {found!r}; the importance ratio needs completions that "
            f"were sampled at a temperature above 0 (from {MIN_TEMPERATURE:g} to "
            f"{FLOAT32_MAX:.2g})",
        )
    return float(found)


def _given_temperatures(group: ScoredGroup, override: dict[str, Any]) -> Iterator[object]:
    for source in (override, group.generation_params or {}, group.group_overrides or {}):
        if source.get("temperature") is not None:
            yield source["temperature"]
