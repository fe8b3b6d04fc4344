"""The scored group, which environments submit and the trainer trains on.

A *group* holds the completions of one prompt. `tokens[i]`, `masks[i]` and `inference_logprobs[i]`
have the same length: prompt followed by completion.

    tokens              [ 5,    6,    7,    90,   91 ]      prompt 5 6 7, completion 90 91
    masks               [-100, -100, -100,  90,   91 ]
    inference_logprobs  [ 1.0,  1.0,  1.0, -0.4, -1.2]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence, Sized
from itertools import islice
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from grpo_core.wire.fields import (
    FLOAT32_MAX,
    MAX_TOKEN_ID,
    MIN_TEMPERATURE,
    Count,
    Float32,
    MaskValue,
    Name,
    Rows,
    TokenId,
    WireModel,
)
from grpo_core.wire.policy_version import PolicyVersion

_MAX_PROBLEMS = 20
ROLLOUT = "rollout_index"
"""In `overrides`: the index of the rollout that a sequence belongs to."""
PADDING = "padding"
"""The `finish_reason` in `overrides` of a sequence that only fills a group up to its size, because
run-api queues groups of one size. Nothing of it is trained on."""
OWN_LOGPROBS = "own_logprobs"
"""True in `group_overrides`: the trainer computed `inference_logprobs`, before it trained on the
group. They say nothing of how the tokens were sampled."""
_REQUIRED = ("tokens", "masks", "scores")
_PER_TOKEN = ("masks", "inference_logprobs", "distill_token_ids", "distill_logprobs")
_PER_SEQUENCE = (
    *_REQUIRED,
    *("advantages", "ref_logprobs", "messages", "inference_logprobs", "overrides"),
    *("distill_token_ids", "distill_logprobs"),
)


class FreeFormFields(WireModel):
    """Fields of a scored group without a fixed structure. All numbers must be finite.

    A number under `temperature` must be 0 or large enough to divide logits by.
    """

    messages: Rows[Rows[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: Rows[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None

    @field_validator("messages")
    @classmethod
    def _messages_name_role_and_content(
        cls, value: list[list[dict[str, Any]]] | None
    ) -> list[list[dict[str, Any]]] | None:
        _refuse(
            f"messages[{i}][{j}] lacks {key!r}"
            for i, conversation in enumerate(value or [])
            for j, message in enumerate(conversation)
            for key in ("role", "content")
            if key not in message
        )
        return value

    @field_validator("messages", "generation_params", "overrides", "group_overrides", "images")
    @classmethod
    def _free_form_numbers_are_finite(cls, value: Any) -> Any:
        if not _is_finite(value):
            _refuse(
                f"{path or 'value'} is not a finite number" for path in _non_finite_paths(value)
            )
        return value

    @field_validator("generation_params", "group_overrides")
    @classmethod
    def _temperature_divides(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        _refuse(_bad_temperatures("", value))
        return value

    @field_validator("overrides")
    @classmethod
    def _temperatures_divide(
        cls, value: list[dict[str, Any]] | None
    ) -> list[dict[str, Any]] | None:
        _refuse(
            problem
            for i, override in enumerate(value or [])
            for problem in _bad_temperatures(f"[{i}].", override)
        )
        return value


class ScoredGroup(FreeFormFields):
    """`POST /scored_data`: the completions of one prompt with their scores.

    Example: the group above with a second completion, 92, which scored worse:

        tokens              [[5, 6, 7, 90, 91], [5, 6, 7, 92]]
        masks               [[-100, -100, -100, 90, 91], [-100, -100, -100, 92]]
        scores              [1.0, 0.0]
        inference_logprobs  [[1.0, 1.0, 1.0, -0.4, -1.2], [1.0, 1.0, 1.0, -0.9]]

    An empty optional list means "absent", because Atropos environments send empty lists. Numbers
    must be within float32's range, or finite in the free-form fields.

    `distill_token_ids` and `distill_logprobs` are [sequence][position][k]: k tokens for this
    position of `tokens`, prompt included, and a teacher model's logprobs of them, given the tokens
    before. k may differ, and may be 0.
    """

    tokens: Rows[Rows[TokenId]]
    masks: Rows[Rows[MaskValue]]
    scores: Rows[Float32]
    advantages: Rows[Rows[Float32]] | None = None
    ref_logprobs: Rows[Rows[Float32]] | None = None
    inference_logprobs: Rows[Rows[Float32]] | None = None
    env_id: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    distill_token_ids: Rows[Rows[Rows[TokenId]]] | None = None
    distill_logprobs: Rows[Rows[Rows[Float32]]] | None = None

    @property
    def size(self) -> int:
        """Number of sequences."""
        return len(self.tokens)

    def without_padding(self) -> ScoredGroup:
        """The group without sequences that only fill it up to its size, see `PADDING`."""
        kept = [
            i
            for i, override in enumerate(self.overrides or ())
            if override.get("finish_reason") != PADDING
        ]
        if self.overrides is None or len(kept) in (0, self.size):
            return self
        return self.with_sequences(kept)

    def with_sequences(self, kept: Sequence[int]) -> ScoredGroup:
        """The group with some of its sequences. Args: kept: their numbers"""
        changes: dict[str, Any] = {
            name: [rows[i] for i in kept] for name in _PER_SEQUENCE if (rows := getattr(self, name))
        }
        facts = dict(self.group_overrides or {})
        versions = facts.get("policy_version")
        if isinstance(versions, list) and len(versions) == self.size:
            facts["policy_version"] = [versions[i] for i in kept]
        return self.model_copy(update=changes | {"group_overrides": facts})

    @property
    def rollouts(self) -> list[int]:
        """For each sequence, the number of the rollout that it belongs to. Without such numbers,
        every sequence is a rollout."""
        found = [override.get(ROLLOUT) for override in self.overrides or ()]
        numbers = [number for number in found if type(number) is int]
        return numbers if len(numbers) == self.size else [*range(self.size)]

    def teacher_logprobs(self, sequence: int) -> list[float | None]:
        """[T] the teacher's logprob of each token of a sequence; None where it gave none."""
        tokens = self.tokens[sequence]
        if not self.distill_token_ids or not self.distill_logprobs:
            return [None] * len(tokens)
        rows = self.distill_token_ids[sequence], self.distill_logprobs[sequence]
        return [
            dict(zip(ids, logprobs, strict=True)).get(token)
            for token, ids, logprobs in zip(tokens, *rows, strict=True)
        ]

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        _refuse(
            problem
            for part in (self._outer(), self._inner(), self._distillation())
            for problem in part
        )
        return self

    def _outer(self) -> Iterator[str]:
        if not self.tokens:
            yield "tokens: a group needs at least one sequence"
            return
        for name in _PER_SEQUENCE:
            value = getattr(self, name)
            if (value or name in _REQUIRED) and len(value) != self.size:
                yield f"{name}: {len(value)} entries for {self.size} sequences"

    def _inner(self) -> Iterator[str]:
        for i, sequence in enumerate(self.tokens):
            if not sequence:
                yield f"tokens[{i}]: empty sequence"
        for name in _PER_TOKEN:
            rows: Sequence[Sized] = getattr(self, name) or ()
            for i, (row, tokens) in enumerate(zip(rows, self.tokens, strict=False)):
                if len(row) != len(tokens):
                    yield f"{name}[{i}]: {len(row)} values for {len(tokens)} tokens"

    def _distillation(self) -> Iterator[str]:
        """Check that there is one token id for each logprob."""
        ids, logprobs = self.distill_token_ids or [], self.distill_logprobs or []
        if bool(ids) != bool(logprobs):
            missing = "distill_logprobs" if ids else "distill_token_ids"
            yield f"{missing}: absent; distill_token_ids and distill_logprobs must come together"
        for i, rows in enumerate(zip(ids, logprobs, strict=False)):
            for j, (at_ids, at_logprobs) in enumerate(zip(*rows, strict=False)):
                if len(at_ids) != len(at_logprobs):
                    yield (
                        f"distill_logprobs[{i}][{j}]: {len(at_logprobs)} values for "
                        f"{len(at_ids)} token ids"
                    )


def _refuse(problems: Iterator[str]) -> None:
    """Raise one `ValueError` that lists all problems, up to `_MAX_PROBLEMS`."""
    listed = list(islice(problems, _MAX_PROBLEMS))
    if not listed:
        return
    if next(problems, None) is not None:
        listed.append(f"and more (the first {_MAX_PROBLEMS} are listed)")
    raise ValueError("; ".join(listed))


def _bad_temperatures(where: str, holder: dict[str, Any] | None) -> Iterator[str]:
    value = (holder or {}).get("temperature")
    if not isinstance(value, int | float) or not value:
        return  # trainers reject values that are not numbers
    if not MIN_TEMPERATURE <= value <= FLOAT32_MAX:
        yield (
            f"{where}temperature must be 0 or between {MIN_TEMPERATURE:g} and "
            f"{FLOAT32_MAX:.2g}: other values make gradients overflow float32"
        )


def _is_finite(root: Any) -> bool:
    """False if `_non_finite_paths` finds one. Writing every path takes three times as long."""
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            return False
    return True


def _non_finite_paths(root: Any) -> Iterator[str]:
    """Paths of every NaN, infinity or too large integer in parsed JSON, e.g. `[0].reward`."""
    pending: list[tuple[str, Any]] = [("", root)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            yield path
        elif isinstance(value, dict):
            pending.extend((f"{path}.{key}", item) for key, item in value.items())
        elif isinstance(value, list):
            pending.extend((f"{path}[{i}]", item) for i, item in enumerate(value))


class RewardSample(WireModel):
    """Sum and number of all rewards since the environment's previous group, with dropped groups.

    Submitted groups alone are biased, because environments drop groups whose scores are all equal.
    """

    sum: Float32
    count: Count
    parts: dict[Name, Float32] = Field(default_factory=dict)
    """Sum of each part of the reward by name, over the same completions; empty if there are
    none."""
    groups: Count | None = None
    """Graded groups; None if the environment does not count them."""
    equal_groups: Annotated[int, Field(ge=0)] = 0
    """Those of them whose scores are all equal."""


class RolloutFacts(WireModel):
    """Facts about how a group was sampled, which our environments add to `group_overrides`.

    run-api would drop unknown top-level fields. Other environments may use the same keys with
    another meaning, so invalid values count as absent.
    """

    policy_version: list[tuple[PolicyVersion, PolicyVersion]] = Field(default_factory=list)
    """[(first, last), ...]: the versions that sampled each completion's first and last token."""
    generation_seconds: Float32 | None = None
    """Duration of the generation request, which sampled the whole group."""
    reward_sample: RewardSample | None = None

    def on_the_wire(self) -> dict[str, Any]:
        """The entries for `group_overrides`: only fields that were set."""
        return self.model_dump(mode="json", exclude_unset=True)

    @classmethod
    def of(cls, group: ScoredGroup) -> Self:
        overrides = group.group_overrides or {}
        said = {key: overrides[key] for key in cls.model_fields if key in overrides}
        try:
            return cls.model_validate(said)
        except ValidationError as error:
            wrong = {problem["loc"][0] for problem in error.errors()}
            return cls.model_validate({k: v for k, v in said.items() if k not in wrong})
