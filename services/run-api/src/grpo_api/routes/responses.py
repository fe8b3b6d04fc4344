"""Answers that are no records of `grpo_core.wire`, as handlers return them or as they are sent.

Handlers are annotated with these, so the OpenAPI document is made of what they return."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from grpo_core.wire.fields import Step
from grpo_core.wire.run_api import EnvironmentCount
from grpo_core.wire.scored_group import ScoredGroup

# pydantic takes the one of `typing` from Python 3.12 on


class Greeting(TypedDict):
    message: Literal["AtroposLib API"]


class Healthy(TypedDict):
    status: Literal["ok"]


class Succeeded(TypedDict):
    status: Literal["success"]


class Failed(TypedDict):
    status: Literal["failure"]
    error: str


class TrainerNames(TypedDict):
    group: str | None
    project: str | None


class Waiting(TypedDict):
    status: Literal["wait for trainer to start"]


class EnvironmentEnrolled(TypedDict):
    status: Literal["success"]
    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int


class KnownEnvironment(TypedDict):
    env_id: int
    name: str
    connected: bool
    group_size: int
    min_sequences: int


class GroupReceived(TypedDict):
    status: Literal["received"]


class GroupBuffered(TypedDict):
    """A part that waits for the rest of its group, with `buffer_size` sequences in all."""

    status: Literal["buffered"]
    buffer_size: int


class GroupsReceived(TypedDict):
    status: Literal["received"]
    groups_processed: int
    buffered: NotRequired[int]
    last_buffer_size: NotRequired[int]


class BatchesAcknowledged(TypedDict):
    """`acknowledged`: the last batch let go of so far; `released` by this call."""

    status: Literal["success"]
    acknowledged: int
    released: int


class _Streamed(BaseModel):
    """Sent as bytes: these describe, nothing is made of them."""

    model_config = ConfigDict(extra="forbid")


class ServedGroup(ScoredGroup):
    """A group as it is handed out: all keys, null where the sender left one out."""

    model_config = ConfigDict(extra="forbid", json_schema_serialization_defaults_required=True)


class NoBatch(_Streamed):
    """There is not enough data, or a minimum is missing. To a poll without `trainer`."""

    batch: None


class NoLease(_Streamed):
    """The same to a poll with `trainer`, and who could send what is missing."""

    batch: None
    environments: EnvironmentCount


class PolledBatch(_Streamed):
    """To a poll without `trainer`."""

    batch: list[ServedGroup]


class LeasedBatch(_Streamed):
    """To a poll with `trainer`. `received_under`: for each group the version that was served when
    it was received, [epoch, step]; null where no server had said what it serves."""

    batch_id: int = Field(ge=1)
    received_under: list[tuple[Step, Step] | None]
    batch: list[ServedGroup]


class TrainerMissing(_Streamed):
    """Nobody has registered, or the run was reset."""

    status: Literal["error"]
    message: str
    batch: list[ServedGroup] = Field(max_length=0)


class NoExample(_Streamed):
    """Before any group was queued: nine keys, each with an empty list."""

    tokens: list[None] = Field(max_length=0)
    masks: list[None] = Field(max_length=0)
    scores: list[None] = Field(max_length=0)
    advantages: list[None] = Field(max_length=0)
    ref_logprobs: list[None] = Field(max_length=0)
    generation_params: list[None] = Field(max_length=0)
    inference_logprobs: list[None] = Field(max_length=0)
    messages: list[None] = Field(max_length=0)
    images: list[None] = Field(max_length=0)
