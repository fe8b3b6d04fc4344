"""Records that travel between services, and the sentinels inside them.

The layout is that of Atropos 0.4.0, so its environments and trainers work unchanged.

Legend: a *group* holds the completions sampled for one prompt. `tokens[i]`, `masks[i]` and
`inference_logprobs[i]` have one length: prompt followed by completion.

    tokens              [ 5,    6,    7,    90,   91 ]      prompt 5 6 7, completion 90 91
    masks               [-100, -100, -100,  90,   91 ]
    inference_logprobs  [ 1.0,  1.0,  1.0, -0.4, -1.2]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Annotated, Any, NamedTuple, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

MASKED = -100
"""Mask value of a position that is not trained on (torch's ignore index)."""

PROMPT_LOGPROB = 1.0
"""Log-probability written at prompt positions: impossible as a value, so it cannot be confused."""

MAX_TOKEN_ID = 2**31 - 1

MAX_BATCH_SIZE = 2**16
"""Sequences in one batch. Planning an exact batch takes as many bits."""

UNSET = -1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
MaskValue = Annotated[int, Field(ge=MASKED, le=MAX_TOKEN_ID)]
FLOAT32_MAX = 3.4028235e38
"""As it is usually printed: a little more, which is rounded to it."""
MIN_TEMPERATURE = 1e-5
"""From here on vLLM samples, below it takes the likeliest token. Gradients with respect to logits
that are divided by far less leave float32."""

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Float32 = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX, allow_inf_nan=False)]
"""Trainers compute in float32, where a larger number is an infinity and ends as a NaN."""
Count = Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
Step = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)]
OptionalCount = Annotated[int, Field(ge=UNSET, le=MAX_TOKEN_ID)]
"""A count that may be left open: -1 and 0 both mean "none", to Atropos environments too."""

MAX_NAME_CHARS = 1024
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS, pattern=r"^[^\x00]*$")]
"""Kept for as long as the run; a NUL in it would break the paths and tables it is put into."""
Directory = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]

IGNORED_WEIGHT = -1.0
"""Of an environment that takes no part in the sharing of slots, as Atropos documents it."""


def _or_ignored(value: Any, weight: ValidatorFunctionWrapHandler) -> Any:
    return IGNORED_WEIGHT if value in (-1, "-1") else weight(value)


def _declare_ignored(schema: dict[str, Any]) -> None:
    weight = dict(schema)
    schema.clear()
    schema["anyOf"] = [weight, {"enum": [-1, "-1"]}]


Weight = Annotated[
    float,
    Field(ge=0.0, le=1e9, allow_inf_nan=False, json_schema_extra=_declare_ignored),
    WrapValidator(_or_ignored),
]

T = TypeVar("T")

Rows = Annotated[list[T], Field(fail_fast=True)]
"""A list that reports its first bad entry only: a body of a million NaN is one problem."""

_MAX_PROBLEMS = 20


class PolicyVersion(NamedTuple):
    """Names one set of weights: a trainer that starts again opens a new epoch.

    In JSON it is the list `[3, 12]`, in text `3.12`, in Redis two fields of a hash.
    """

    epoch: Step
    step: Step

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises `ValueError`."""
        epoch, step = text.split(".")
        return cls(int(epoch), int(step))

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Self:
        """The inverse of `fields`, as Redis answers. Raises `KeyError`, `ValueError`."""
        return cls(int(fields["epoch"]), int(fields["step"]))

    def fields(self) -> dict[str, int]:
        return self._asdict()

    def next_epoch(self) -> Self:
        """The first name of the epoch after this one: no trainer has used it."""
        return type(self)(self.epoch + 1, 0)


class WireModel(BaseModel):
    """Unknown fields are dropped, as upstream does; numbers are coerced where nothing is lost."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Registration(WireModel):
    """`POST /register`: what a trainer announces. `batch_size` counts sequences.

    A `max_token_len` below 1 tells environments not to drop long sequences, a
    `save_checkpoint_interval` below 1 not to save, a `num_steps` of -1 to bring their own.
    """

    wandb_group: Name
    wandb_project: Name
    batch_size: BatchSize
    max_token_len: OptionalCount
    checkpoint_dir: Directory
    save_checkpoint_interval: OptionalCount
    starting_step: Step
    num_steps: OptionalCount


class EnvironmentRegistration(WireModel):
    """`POST /register-env`: what an environment announces. `group_size` counts sequences."""

    max_token_length: Count
    desired_name: Name
    weight: Weight
    group_size: Count
    min_batch_allocation: Annotated[float, Field(ge=0.0, le=1.0)] | None = None


class EnvironmentId(WireModel):
    env_id: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class FreeFormFields(WireModel):
    """What of a scored group has no shape of its own. Its numbers are finite: JSON has no NaN.

    A number under `temperature`, where trainers look for it, is 0 or one to divide logits by.
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
        _refuse(f"{path or 'value'} is not a finite number" for path in _non_finite_paths(value))
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

    Empty optional lists mean "absent": upstream environments send them. Numbers are within
    float32's range; inside the free-form fields they are finite: JSON has no NaN.

    `distill_token_ids` and `distill_logprobs` are [sequence][position][k]: a teacher's choices at
    every position of `tokens`, prompt included. k may differ by position, down to none.
    """

    tokens: Rows[Rows[TokenId]]
    masks: Rows[Rows[MaskValue]]
    scores: Rows[Float32]
    advantages: Rows[Rows[Float32]] | None = None
    ref_logprobs: Rows[Rows[Float32]] | None = None
    messages: Rows[Rows[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: Rows[Rows[Float32]] | None = None
    overrides: Rows[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None
    env_id: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    distill_token_ids: Rows[Rows[Rows[TokenId]]] | None = None
    distill_logprobs: Rows[Rows[Rows[Float32]]] | None = None

    @property
    def size(self) -> int:
        """Number of sequences."""
        return len(self.tokens)

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
        required: dict[str, Sized] = {"masks": self.masks, "scores": self.scores}
        optional: dict[str, Sized | None] = {
            "advantages": self.advantages,
            "ref_logprobs": self.ref_logprobs,
            "messages": self.messages,
            "inference_logprobs": self.inference_logprobs,
            "overrides": self.overrides,
            "distill_token_ids": self.distill_token_ids,
            "distill_logprobs": self.distill_logprobs,
        }
        checked = required | {name: value for name, value in optional.items() if value}
        for name, value in checked.items():
            if len(value) != self.size:
                yield f"{name}: {len(value)} entries for {self.size} sequences"

    def _inner(self) -> Iterator[str]:
        for i, sequence in enumerate(self.tokens):
            if not sequence:
                yield f"tokens[{i}]: empty sequence"
        rows: dict[str, Sequence[Sized] | None] = {
            "masks": self.masks,
            "inference_logprobs": self.inference_logprobs,
            "distill_token_ids": self.distill_token_ids,
            "distill_logprobs": self.distill_logprobs,
        }
        for name, values in rows.items():
            for i, (row, tokens) in enumerate(zip(values or [], self.tokens, strict=False)):
                if len(row) != len(tokens):
                    yield f"{name}[{i}]: {len(row)} values for {len(tokens)} tokens"

    def _distillation(self) -> Iterator[str]:
        """The two fields are one table: a token id for each log-probability."""
        ids, logprobs = self.distill_token_ids or [], self.distill_logprobs or []
        if bool(ids) != bool(logprobs):
            missing = "distill_logprobs" if ids else "distill_token_ids"
            yield f"{missing}: absent, while its counterpart is given"
        for i, rows in enumerate(zip(ids, logprobs, strict=False)):
            for j, (at_ids, at_logprobs) in enumerate(zip(*rows, strict=False)):
                if len(at_ids) != len(at_logprobs):
                    yield (
                        f"distill_logprobs[{i}][{j}]: {len(at_logprobs)} values for "
                        f"{len(at_ids)} token ids"
                    )


def _refuse(problems: Iterator[str]) -> None:
    """Raise one `ValueError` that lists every problem; the list is cut when it is very long."""
    listed = list(islice(problems, _MAX_PROBLEMS))
    if not listed:
        return
    if next(problems, None) is not None:
        listed.append(f"and more (the first {_MAX_PROBLEMS} are listed)")
    raise ValueError("; ".join(listed))


def _bad_temperatures(where: str, holder: dict[str, Any] | None) -> Iterator[str]:
    value = (holder or {}).get("temperature")
    if not isinstance(value, int | float) or not value:  # trainers refuse those that are none
        return
    if not MIN_TEMPERATURE <= abs(value) <= FLOAT32_MAX:
        yield (
            f"{where}temperature is neither 0 nor between {MIN_TEMPERATURE:g} and "
            f"{FLOAT32_MAX:.2g}: gradients through logits that are divided by it leave float32"
        )


def _non_finite_paths(root: Any) -> Iterator[str]:
    """Where a NaN, an infinity or an integer beyond floats hides in parsed JSON: `[0].reward`."""
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
    """Rewards of everything graded since the environment's previous group, this one and the
    dropped ones included. Groups alone give a biased mean: those whose scores are all equal never
    reach the trainer."""

    sum: Float32
    count: Count


class RolloutFacts(WireModel):
    """What our environments say about a group's making, inside `group_overrides`: run-api drops
    unknown top-level fields. The keys are free for others to use, so what does not fit counts as
    not said.
    """

    policy_version: list[tuple[PolicyVersion, PolicyVersion]] = []
    """[(first, last), ...]: the versions that sampled each completion's first and last token."""
    generation_seconds: Float32 | None = None
    """How long the group's one generation request took."""
    reward_sample: RewardSample | None = None

    def on_the_wire(self) -> dict[str, Any]:
        """The entries for `group_overrides`: what was said, and nothing else."""
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


class TrainerEnrolled(WireModel):
    """Answer of `POST /register`. `uuid` is the trainer's id (128 bits), for the lease routes;
    `run_uuid` as in `RunStatus`."""

    uuid: int
    run_uuid: str


class RunStatus(WireModel):
    """`GET /status`. `queue_size` counts groups that no batch holds yet; `run_uuid` is made with a
    run's first trainer and ends with /reset_data, None: there is no run."""

    current_step: int
    queue_size: int
    run_uuid: str | None = None


class EnvironmentCount(WireModel):
    """Of a run: environments that ever registered, and those that have neither left nor fallen
    silent."""

    registered: int
    connected: int


class EnvironmentStatus(WireModel):
    """`GET /status-env`: what one environment needs to pace itself; sizes in its own groups.

    `pressure` says how full the queue is, from 0.0 at half of its limit to 1.0 at the limit;
    `num_steps` at which `current_step` the trainer has all its batches; None where it does not say.
    """

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float
    pressure: float = 0.0
    num_steps: int | None = None


class TrainerInfo(WireModel):
    """`GET /info`; both -1 until a trainer has registered."""

    batch_size: int
    max_token_len: int
