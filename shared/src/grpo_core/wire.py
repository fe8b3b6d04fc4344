"""Records that travel between services, and the sentinels inside them.

The layout is that of Atropos 0.4.0, so its environments and trainers work unchanged.

Legend: a *group* holds the completions sampled for one prompt. `tokens[i]`, `masks[i]` and
`inference_logprobs[i]` have one length: prompt followed by completion.

    tokens              [ 5,    6,    7,    90,   91 ]      prompt 5 6 7, completion 90 91
    masks               [-100, -100, -100,  90,   91 ]
    inference_logprobs  [ 1.0,  1.0,  1.0, -0.4, -1.2]
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MASKED = -100
"""Mask value of a position that is not trained on (torch's ignore index)."""

PROMPT_LOGPROB = 1.0
"""Log-probability written at prompt positions: impossible as a value, so it cannot be confused."""

POLICY_VERSION_KEY = "policy_version"
"""Key in `group_overrides`: [[first, last], ...], the versions at each completion's ends."""

GENERATION_SECONDS_KEY = "generation_seconds"
"""Key in `group_overrides`: how long the group's one generation request took."""

MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
MaskValue = Annotated[int, Field(ge=MASKED, le=MAX_TOKEN_ID)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
Step = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class PolicyVersion(NamedTuple):
    """Names one set of weights: a trainer that starts again opens a new epoch."""

    epoch: int
    step: int


class WireModel(BaseModel):
    """Unknown fields are dropped, as upstream does; numbers are coerced where nothing is lost."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Registration(WireModel):
    """`POST /register`: what a trainer announces. `batch_size` counts sequences."""

    wandb_group: str
    wandb_project: str
    batch_size: Count
    max_token_len: Count
    checkpoint_dir: str
    save_checkpoint_interval: Step
    starting_step: Step
    num_steps: Step


class EnvironmentRegistration(WireModel):
    """`POST /register-env`: what an environment announces. `group_size` counts sequences."""

    max_token_length: Count
    desired_name: str
    weight: Annotated[float, Field(allow_inf_nan=False)]
    group_size: Count
    min_batch_allocation: Annotated[float, Field(ge=0.0, le=1.0)] | None = None


class EnvironmentId(WireModel):
    env_id: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class ScoredGroup(WireModel):
    """`POST /scored_data`: the completions of one prompt with their scores.

    Empty optional lists mean "absent": upstream environments send them.
    """

    tokens: list[list[TokenId]]
    masks: list[list[MaskValue]]
    scores: list[FiniteFloat]
    advantages: list[list[FiniteFloat]] | None = None
    ref_logprobs: list[list[FiniteFloat]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[FiniteFloat]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None
    env_id: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    distill_token_ids: list[list[list[TokenId]]] | None = None
    distill_logprobs: list[list[list[FiniteFloat]]] | None = None

    @property
    def size(self) -> int:
        """Number of sequences."""
        return len(self.tokens)

    @field_validator("messages")
    @classmethod
    def _messages_name_role_and_content(
        cls, value: list[list[dict[str, Any]]] | None
    ) -> list[list[dict[str, Any]]] | None:
        missing = [
            f"messages[{i}][{j}] lacks {key!r}"
            for i, conversation in enumerate(value or [])
            for j, message in enumerate(conversation)
            for key in ("role", "content")
            if key not in message
        ]
        if missing:
            raise ValueError("; ".join(missing))
        return value

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        problems = self._outer_mismatches() + self._inner_mismatches()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _outer_mismatches(self) -> list[str]:
        if not self.tokens:
            return ["tokens: a group needs at least one sequence"]
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
        return [
            f"{name}: {len(value)} entries for {self.size} sequences"
            for name, value in checked.items()
            if len(value) != self.size
        ]

    def _inner_mismatches(self) -> list[str]:
        problems = [f"tokens[{i}]: empty sequence" for i, row in enumerate(self.tokens) if not row]
        rows: dict[str, Sequence[Sized]] = {
            "masks": self.masks,
            "inference_logprobs": self.inference_logprobs or [],
        }
        for name, values in rows.items():
            problems += [
                f"{name}[{i}]: {len(row)} values for {len(tokens)} tokens"
                for i, (row, tokens) in enumerate(zip(values, self.tokens, strict=False))
                if len(row) != len(tokens)
            ]
        return problems


class ServerStatus(WireModel):
    """`GET /status`. `queue_size` counts groups that no batch holds yet."""

    current_step: int
    queue_size: int


class EnvironmentStatus(WireModel):
    """`GET /status-env`: what one environment needs to pace itself; sizes in its own groups."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float


class TrainerInfo(WireModel):
    """`GET /info`; both -1 until a trainer has registered."""

    batch_size: int
    max_token_len: int
