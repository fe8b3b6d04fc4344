"""Records that run-api receives and returns, other than scored groups."""

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
from grpo_core.wire.policy_version import PolicyVersion

RUN_UUID_HEADER = "run-uuid"
"""Header of a submission: the run for which it was sampled, as in `RunStatus`."""
ITEM_POSITIONS_HEADER = "item-positions"
"""Header of a submission: which items its environment has used, in JSON, as ranges of numbers by
names of the environment's choice: `{"gsm8k 0 5f0c1a2e": "0-41,43-45"}`. run-api adds them up as it
stores the group, and tells each environment that registers."""
QUEUE_FULL = "the queue has been full"
"""In the reason of a refused submission (503): run-api works, and the trainer is slow."""


class Registration(WireModel):
    """`POST /register`: the registration of a trainer. `batch_size` counts sequences.

    With `max_token_len` below 1 environments keep long sequences. With `save_checkpoint_interval`
    below 1 they save nothing. With `num_steps` -1 they use their own number of steps.
    `server_run_id`: the `--run-id` of the trainer's inference server, if it differs from that of
    run-api.
    """

    wandb_group: Name
    wandb_project: Name
    batch_size: BatchSize
    max_token_len: OptionalCount
    checkpoint_dir: Directory
    save_checkpoint_interval: OptionalCount
    starting_step: Step
    num_steps: OptionalCount
    server_run_id: Name | None = None


class EnvironmentRegistration(WireModel):
    """`POST /register-env`: the registration of an environment. `group_size` counts sequences."""

    max_token_length: Count
    desired_name: Name
    weight: Weight
    group_size: Count
    min_batch_allocation: Annotated[float, Field(ge=0.0, le=1.0)] | None = None


class WandbNames(WireModel):
    """Answer of `GET /wandb_info`: the trainer's names; None while no trainer is registered."""

    group: str | None
    project: str | None


class EnvironmentId(WireModel):
    env_id: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class TrainerEnrolled(WireModel):
    """Answer of `POST /register`. `uuid`: the trainer's id (128 bits), for the lease routes.

    `run_uuid`: as in `RunStatus`.
    """

    uuid: int
    run_uuid: str


class RunStatus(WireModel):
    """Answer of `GET /status`. `queue_size` counts groups that belong to no batch yet.

    `run_uuid`: created when a run's first trainer registers, deleted by /reset_data; None if there
    is no run. `last_batch`: id of the newest batch that was handed out, 0 before the first; None
    from former versions of run-api. The others: as in `EnvironmentCount`.
    """

    current_step: int
    queue_size: int
    run_uuid: str | None = None
    last_batch: int | None = None
    refused_groups: int = 0
    last_refusal: str = ""
    lost_groups: int = 0


class EnvironmentCount(WireModel):
    """Environments of a run: all that ever registered, and those that are still connected.

    A connected environment has not called /disconnect-env and has polled lately. `refused_groups`:
    groups that run-api refused with status 400, 409, 413 or 422 since the last trainer registered.
    `last_refusal`: the reason for the last of them, in one line; "" if there is none.
    `lost_groups`: groups of this run that run-api had accepted, and that Redis no longer had when
    it started again.
    """

    registered: int
    connected: int
    refused_groups: int = 0
    last_refusal: str = ""
    lost_groups: int = 0


class ListedServer(WireModel):
    """An inference server of the run, as it reported itself within the last ten seconds.

    `version`: of the served weights. `state`: a `grpo_core.weights.servers.ServerState`, or another
    word of a newer server. `name` is unique in the run; the server may have further URLs.
    """

    name: str = ""
    url: str
    version: PolicyVersion
    state: str


class EnvironmentStatus(WireModel):
    """Answer of `GET /status-env`, from which an environment decides how fast it sends groups.

    Sizes are in its own groups. `pressure` is 0.0 while the queue is at most half full, and 1.0 at
    its limit. `num_steps`: the value of `current_step` at which the trainer has all its batches;
    None if it is unknown. `servers`: those to which it may send requests, besides those that it
    knows; empty if no server reports itself.
    """

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float
    pressure: float = 0.0
    num_steps: int | None = None
    servers: tuple[ListedServer, ...] = ()


class TrainerInfo(WireModel):
    """Answer of `GET /info`. Both are -1 until a trainer has registered."""

    batch_size: int
    max_token_len: int
