"""Types of the answers that are not records of `grpo_core.wire`.

Handlers are annotated with these types, and the OpenAPI document is built from them.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from grpo_core.wire.fields import Step
from grpo_core.wire.run_api import EnvironmentCount
from grpo_core.wire.scored_group import ScoredGroup

# pydantic accepts `typing.TypedDict` only from Python 3.12


class Greeting(TypedDict):
    message: Literal["AtroposLib API"]


class Healthy(TypedDict):
    status: Literal["ok"]


class Succeeded(TypedDict):
    status: Literal["success"]


class Failed(TypedDict):
    """run-api has no environment with this `env_id`."""

    status: Literal["failure"]
    error: str


class TrainerNames(TypedDict):
    group: str | None
    project: str | None


class Waiting(TypedDict):
    """The environment is not registered, because no trainer has requested a batch yet."""

    status: Literal["wait for trainer to start"]


class EnvironmentEnrolled(TypedDict):
    """The environment is registered."""

    status: Literal["success"]
    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int
    run_uuid: str


class KnownEnvironment(TypedDict):
    env_id: int
    name: str
    connected: bool
    group_size: int
    min_sequences: int


class GroupReceived(TypedDict):
    """The group is in the queue."""

    status: Literal["received"]


class GroupBuffered(TypedDict):
    """The group is partial. `buffer_size` is the number of sequences in all partial groups of the
    environment."""

    status: Literal["buffered"]
    buffer_size: int


class GroupsReceived(TypedDict):
    status: Literal["received"]
    groups_processed: int
    buffered: NotRequired[int]
    last_buffer_size: NotRequired[int]


class BatchesAcknowledged(TypedDict):
    """`acknowledged`: the last acknowledged batch. `released`: batches deleted by this call."""

    status: Literal["success"]
    acknowledged: int
    released: int


class _Streamed(BaseModel):
    """Only describes an answer that is sent as bytes; no instance is created."""

    model_config = ConfigDict(extra="forbid")


class ServedGroup(ScoredGroup):
    """The newest group. A field of the group is null if the environment did not send the field."""

    model_config = ConfigDict(extra="forbid", json_schema_serialization_defaults_required=True)


class NoBatch(_Streamed):
    """The answer if no batch is complete and the request has no parameter `trainer`."""

    batch: None


class NoLease(_Streamed):
    """The answer if no batch is complete and the request has the parameter `trainer`.
    `environments` counts the environments of the run."""

    batch: None
    environments: EnvironmentCount


class PolledBatch(_Streamed):
    """A batch, if the request has no parameter `trainer`."""

    batch: list[ServedGroup]


class LeaseAnswer(_Streamed):
    """A leased batch, if the request has the parameter `trainer`.

    `received_under` contains one entry for each group: the policy version [epoch, step] that was
    served when run-api received the group, or null if the version is unknown.
    """

    batch_id: int = Field(ge=1)
    received_under: list[tuple[Step, Step] | None]
    batch: list[ServedGroup]


class TrainerMissing(_Streamed):
    """No trainer has registered, or the run was reset."""

    status: Literal["error"]
    message: str
    batch: list[ServedGroup] = Field(max_length=0)


class NoExample(_Streamed):
    """No group has been queued yet: the answer has nine fields, each with an empty list."""

    tokens: list[None] = Field(max_length=0)
    masks: list[None] = Field(max_length=0)
    scores: list[None] = Field(max_length=0)
    advantages: list[None] = Field(max_length=0)
    ref_logprobs: list[None] = Field(max_length=0)
    generation_params: list[None] = Field(max_length=0)
    inference_logprobs: list[None] = Field(max_length=0)
    messages: list[None] = Field(max_length=0)
    images: list[None] = Field(max_length=0)
