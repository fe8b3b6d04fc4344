"""Checks whether a scored group can be trained on, and reads what training needs from it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_core.wire.fields import (
    FLOAT32_MAX,
    LOGPROB_SLACK,
    MASKED,
    MIN_TEMPERATURE,
    PROMPT_LOGPROB,
)
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.receipt import NEUTRAL_SAMPLING
from grpo_core.wire.scored_group import OWN_LOGPROBS, RolloutFacts, ScoredGroup
from grpo_trainer.errors import NO_INFERENCE_LOGPROBS, UnusableGroup, UnusableReason

Tokens = list[int]


@dataclass(frozen=True)
class GroupLimits:
    """`vocab_size`: token ids must be smaller; `seq_len`: longer sequences are cut to this length;
    `recomputes`: groups without usable behaviour logprobs are accepted; `end_tokens`: token ids
    that end a completion; `needs_teacher`: groups without a teacher's logprobs are refused."""

    vocab_size: int
    seq_len: int
    recomputes: bool = False
    end_tokens: frozenset[int] = frozenset()
    needs_teacher: bool = False


@dataclass(frozen=True)
class UsableSequence:
    """A sequence of a group that passed every check, with the values that training reads.

    Example: the second completion of the prompt 5 6, with its score in `group`:

        tokens          5    6    8    9
        trained         no   no   yes  yes
        behaviour_logp  1.0  1.0 -0.2 -0.3
        temperature 1.0, index 1, shared_tokens 2, versions ((1, 7), (1, 7))
    """

    group: ScoredGroup
    """Without sequences that only fill it up."""
    group_index: int
    """Place of its group in the batch."""
    index: int
    """Place of the sequence in its group."""
    tokens: Tokens  # [T]
    trained: list[bool]  # [T]
    behaviour_logp: list[float]  # [T] as sent; placeholders if none are usable
    temperature: float
    shared_tokens: int
    """Length of the common beginning of its group's sequences: the prompt, often a little more."""
    zero_advantage: bool
    """Its advantage is set to zero."""
    is_logged: bool
    """The behaviour logprobs are those of the distribution that was sampled from."""
    has_own_logprobs: bool
    """The trainer computed `behaviour_logp`."""
    versions: tuple[PolicyVersion, PolicyVersion] | None
    """Those that sampled its first and its last token, in this trainer's numbering; None if the
    group does not name those of each sequence."""
    received_under: PolicyVersion | None = None
    """The version that was served when run-api received the group."""

    @property
    def version(self) -> PolicyVersion | None:
        """The policy version that sampled all of it; None if it is unknown, if there are several,
        or if its logprobs were not logged, so that a comparison would prove nothing."""
        first, last = self.versions or (None, None)
        return first if first == last and self.is_logged else None

    @property
    def begun_by(self) -> PolicyVersion | None:
        """The version that sampled its first token, else the newest that may have; None if both
        are unknown."""
        return self.versions[0] if self.versions else self.received_under


def usable_sequences(index: int, group: ScoredGroup, limits: GroupLimits) -> list[UsableSequence]:
    """Check one group. Args: index: its place in the batch

    Raises:
        UnusableGroup: inference_logprobs are missing or positive, the sampling options change the
            distribution, masks or advantages do not fit the tokens, the prompt is unmasked, no
            token is trained on, tokens after an end token are, a token is outside the policy's
            vocabulary, a teacher's logprobs are missing, or belong to another temperature.
    """
    group = group.without_padding()
    problem = _why_not_logged(index, group)
    if problem is not None and not limits.recomputes:
        raise problem
    _check_tokens(index, group, limits.vocab_size)
    _check_masks(index, group)
    _check_advantages(index, group)
    logged = group.inference_logprobs or []
    has_own = bool((group.group_overrides or {}).get(OWN_LOGPROBS))
    if problem is not None and not has_own:
        logged = [[PROMPT_LOGPROB] * len(tokens) for tokens in group.tokens]
    else:
        # Without logprobs, an environment may train on what its template puts after an end token.
        _check_ends(index, group, limits.end_tokens)
        for i, (masks, logprobs) in enumerate(zip(group.masks, logged, strict=True)):
            _check_logprobs(f"group {index}, sequence {i}", masks, logprobs)
    _check_prompts(index, group)
    _check_cut(index, group, limits.seq_len)
    overrides: list[dict[str, Any]] = group.overrides or [{}] * group.size
    temperatures = [_temperature(index, group, override) for override in overrides]
    if limits.needs_teacher:
        _check_teacher(index, group, temperatures)
    versions = RolloutFacts.of(group).policy_version
    # The first and the last in alphabetical order differ where any two differ.
    shared = common_prefix(min(group.tokens), max(group.tokens))
    return [
        UsableSequence(
            group=group,
            group_index=index,
            index=i,
            tokens=group.tokens[i],
            trained=[mask != MASKED for mask in group.masks[i]],
            behaviour_logp=logged[i],
            temperature=temperatures[i],
            shared_tokens=shared,
            zero_advantage=bool(overrides[i].get("set_advantage_to_zero")),
            is_logged=problem is None,
            has_own_logprobs=has_own,
            versions=versions[i] if len(versions) == group.size else None,
        )
        for i in range(group.size)
    ]


def sequences_of(groups: Iterable[ScoredGroup], limits: GroupLimits) -> list[UsableSequence]:
    """Group after group. Raises `UnusableGroup` for the first group that is unusable."""
    return [s for i, group in enumerate(groups) for s in usable_sequences(i, group, limits)]


def _why_not_logged(index: int, group: ScoredGroup) -> UnusableGroup | None:
    """Why the group has no logprobs of the distribution that was sampled from; None if it has."""
    if (group.group_overrides or {}).get(OWN_LOGPROBS):
        return UnusableGroup(
            UnusableReason.SAMPLING,
            f"group {index} has logprobs that a trainer computed; pass --recompute-logprobs",
        )
    if not group.inference_logprobs:
        message = NO_INFERENCE_LOGPROBS.format(index=index, env_id=group.env_id)
        return UnusableGroup(UnusableReason.NO_LOGPROBS, message)
    truncating = {
        f"{name}={source[name]}"
        for source in _sampling_options(group)
        for name, neutral in NEUTRAL_SAMPLING.items()
        if source.get(name) is not None and source[name] not in neutral
    }
    if not truncating:
        return None
    return UnusableGroup(
        UnusableReason.SAMPLING,
        f"group {index} was sampled with {', '.join(sorted(truncating))}, so its logprobs describe "
        "another distribution; set no sampling parameter except the temperature, or pass "
        "--recompute-logprobs to the trainer",
    )


def _sampling_options(group: ScoredGroup) -> list[dict[str, Any]]:
    """All places that may state some."""
    return [group.generation_params or {}, group.group_overrides or {}, *(group.overrides or [])]


def _check_tokens(index: int, group: ScoredGroup, vocab_size: int) -> None:
    for i, tokens in enumerate(group.tokens):
        if max(tokens) >= vocab_size:
            raise UnusableGroup(
                UnusableReason.UNKNOWN_TOKEN,
                f"group {index}, sequence {i}: token id {max(tokens)} is outside the policy's "
                f"vocabulary of {vocab_size}; use one tokenizer in environment and trainer",
            )


def _check_masks(index: int, group: ScoredGroup) -> None:
    for i, (tokens, masks) in enumerate(zip(group.tokens, group.masks, strict=True)):
        if any(m not in (MASKED, t) for m, t in zip(masks, tokens, strict=True)):
            raise UnusableGroup(
                UnusableReason.MASKS,
                f"group {index}, sequence {i}: a mask is neither {MASKED} nor the token at "
                "its position; align the environment's masks with its tokens",
            )
    if not any(_trained_positions(masks) for masks in group.masks):
        raise UnusableGroup(
            UnusableReason.NOTHING_TRAINED,
            f"group {index}: every mask is {MASKED}, so there is nothing to train on; in the "
            "environment, set the mask of each completion token to the token itself",
        )


def _check_ends(index: int, group: ScoredGroup, end_tokens: frozenset[int]) -> None:
    """Nothing is sampled after an end token, so what follows it directly is padding, or both belong
    to the prompt."""
    if any(source.get("ignore_eos") for source in _sampling_options(group)):
        return
    pairs = zip(group.tokens, group.masks, strict=True)
    ends = [_trained_end(*pair, end_tokens) for pair in pairs]
    found = [end for end in ends if end is not None]
    if not found:
        return
    if max(found) + 1 < common_prefix(min(group.tokens), max(group.tokens)) < len(group.tokens[0]):
        raise UnusableGroup(
            UnusableReason.PROMPT_TRAINED,
            f"group {index}: all its sequences begin with the same end token, which is trained on, "
            f"so it belongs to the prompt; let the environment mask all of it with {MASKED}",
        )
    raise UnusableGroup(
        UnusableReason.TRAINED_AFTER_END,
        f"group {index}: in {len(found)} of {group.size} sequences, tokens directly after an end "
        "token are trained on, as if padding was sampled; in the environment, set masks to "
        f"{MASKED} after the end token, or state generation_params.ignore_eos",
    )


def _trained_end(tokens: list[int], masks: list[int], end_tokens: frozenset[int]) -> int | None:
    """Position of the first end token that is trained on together with the next token."""
    return min(
        (
            at
            for end in end_tokens
            for at in _places(tokens, end)
            if at + 1 < len(tokens) and MASKED not in masks[at : at + 2]
        ),
        default=None,
    )


def _places(tokens: list[int], token: int) -> Iterator[int]:
    """Where a token occurs. Much faster than to look at each position."""
    at = -1
    for _ in range(tokens.count(token)):
        at = tokens.index(token, at + 1)
        yield at


def _check_advantages(index: int, group: ScoredGroup) -> None:
    pairs = zip(group.advantages or [], group.tokens, strict=False)
    for i, (advantages, tokens) in enumerate(pairs):
        if len(advantages) not in (1, len(tokens)):
            raise UnusableGroup(
                UnusableReason.ADVANTAGES,
                f"group {index}, sequence {i}: {len(advantages)} advantages for {len(tokens)} "
                "tokens; set one for each, prompt included, or one for the sequence, or none",
            )


def _check_teacher(index: int, group: ScoredGroup, temperatures: Sequence[float]) -> None:
    rows = (group.teacher_logprobs(i) for i in range(group.size))
    if all(logprob is None for row in rows for logprob in row):
        raise UnusableGroup(
            UnusableReason.NO_TEACHER,
            f"group {index} (env_id {group.env_id}) has no distill_logprobs; pass --teacher-url to "
            "env-server, or start the trainer without --distill-coef and --objective distill",
        )
    if set(temperatures) != {1.0}:
        raise UnusableGroup(
            UnusableReason.TEMPERATURE,
            f"group {index} (env_id {group.env_id}) was sampled at temperature "
            f"{max(temperatures, key=lambda one: abs(one - 1)):g}, but a teacher's logprobs are "
            "those at temperature 1; sample at temperature 1, or start the trainer without "
            "--distill-coef and --objective distill",
        )


def _check_cut(index: int, group: ScoredGroup, seq_len: int) -> None:
    first = min(positions[0] for m in group.masks if (positions := _trained_positions(m)))
    if first >= seq_len:
        raise UnusableGroup(
            UnusableReason.CUT_OFF,
            f"group {index}: none of the first {seq_len} tokens (--seq-len) is trained on; the "
            f"first is token {first + 1}. Raise --seq-len, or shorten the environment's prompts",
        )


def _check_logprobs(where: str, masks: list[int], logprobs: list[float]) -> None:
    trained = [logprobs[t] for t in _trained_positions(masks)]
    positive = [logp for logp in trained if logp > LOGPROB_SLACK]
    if positive:
        raise UnusableGroup(
            UnusableReason.POSITIVE_LOGPROBS,
            f"{where}: in inference_logprobs, {len(positive)} of {len(trained)} logprobs of "
            "trained tokens are above 0, as if they belonged to prompt tokens, which have "
            f"{PROMPT_LOGPROB}. In the environment, mask every prompt token, and align masks with "
            "inference_logprobs. The archived trainer reports such logprobs with the words "
            f"'ref_logprobs avg {sum(positive) / len(positive):.3f} (should be negative!)'",
        )


def _check_prompts(index: int, group: ScoredGroup) -> None:
    """No earlier token can have predicted the first one, so it belongs to the prompt."""
    unmasked = [i for i, masks in enumerate(group.masks) if masks[0] != MASKED]
    if unmasked:
        raise UnusableGroup(
            UnusableReason.PROMPT_TRAINED,
            f"group {index}: in {len(unmasked)} of {group.size} sequences, the first token is not "
            f"masked; let the environment set the masks of all prompt tokens to {MASKED}",
        )


def _trained_positions(masks: list[int]) -> list[int]:
    """Positions that are trained on, without the first, which nothing predicts."""
    return [t for t in range(1, len(masks)) if masks[t] != MASKED]


def _temperature(index: int, group: ScoredGroup, override: dict[str, Any]) -> float:
    """The sequence's override, else the generation parameters' value, else the group's override."""
    sources = (override, group.generation_params or {}, group.group_overrides or {})
    stated = (source.get("temperature") for source in sources)
    found = next((value for value in stated if value is not None), 1.0)
    if (
        isinstance(found, bool)
        or not isinstance(found, int | float)
        or not MIN_TEMPERATURE <= found <= FLOAT32_MAX
    ):
        raise UnusableGroup(
            UnusableReason.TEMPERATURE,
            f"group {index} states temperature {found!r}; expected a float32 number of at least "
            f"{MIN_TEMPERATURE:g}, because the trainer divides logits by the temperature",
        )
    return float(found)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the common beginning."""
    lengths = range(1, min(len(a), len(b)) + 1)
    return bisect_left(lengths, True, key=lambda length: a[:length] != b[:length])
