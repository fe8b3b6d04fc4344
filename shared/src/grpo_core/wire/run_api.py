"""The other bodies that run-api takes, and the records that it answers with."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_core.wire.fields import (
    MAX_TOKEN_ID,
    BatchSize,
    Count,
    Directory,
    Name,
    OptionalCount,
    Step,
    Weight,
    WireModel,
)


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
