"""The environment's place in a run: registers with run-api, waits for a trainer, logs to W&B."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import structlog

from grpo_core.clients.run_api import EnvironmentClient, parse
from grpo_core.deadline import Deadline
from grpo_core.wandb_run import start_wandb
from grpo_core.wire.fields import WireModel
from grpo_core.wire.run_api import EnvironmentRegistration
from grpo_env.pacing import NoTrainer
from grpo_env.settings import EnvServerSettings

log = structlog.get_logger()

_POLL_S = 0.5


ENDLESS = sys.maxsize
"""The number of steps of a run without a limit."""


class Membership(WireModel):
    """run-api's answer to a registered environment. `run_uuid`: "" if run-api names no run.
    `item_positions`: as environments have sent them with their groups."""

    env_id: int
    wandb_name: str
    starting_step: int
    num_steps: int
    run_uuid: str = ""
    item_positions: Mapping[str, str] = {}

    def total_steps(self, own: int, latest: int | None = None) -> int:
        """The step at which the run ends; `ENDLESS` if the trainer's number is below 1.

        Args:
            own: this environment's setting; -1 to use the trainer's number
            latest: the number of the current trainer, if known. The trainer may have been replaced
                since this environment registered.
        """
        if own != -1:
            return own
        num_steps = self.num_steps if latest is None else latest
        return num_steps if num_steps > 0 else ENDLESS


async def join_run(
    api: EnvironmentClient, registration: EnvironmentRegistration, trainer_deadline_s: float
) -> Membership:
    """Register. If there is no trainer yet, wait for one.

    Raises:
        NoTrainer: no trainer registered within `trainer_deadline_s` seconds.
        ServiceUnavailable: run-api does not answer.
        RequestRefused: run-api refuses this environment.
    """
    deadline = Deadline(trainer_deadline_s)
    answer = await api.register(registration)
    if answer is None:
        log.info("wait_for_trainer.started", deadline_s=trainer_deadline_s)
    while answer is None:
        if deadline.has_passed:
            raise NoTrainer(
                f"no trainer registered at {api.base_url} within {trainer_deadline_s:g} s; "
                "start a trainer that uses the same run-api, or raise --trainer-deadline-s"
            )
        await asyncio.sleep(_POLL_S)
        answer = await api.register(registration)
    return parse(Membership, answer)


PREFIX, EVALUATION = "env/", "eval/"
Log = Callable[[int, Mapping[str, Any]], None]
"""Called with the trainer's step and the fields of a report."""


@contextlib.asynccontextmanager
async def wandb_log(
    settings: EnvServerSettings, api: EnvironmentClient, membership: Membership
) -> AsyncIterator[Log]:
    """Yield a function that never blocks. Without `--use-wandb` it does nothing.

    Raises:
        WandbUnavailable: W&B cannot start.
        ServiceUnavailable: run-api does not answer.
    """
    if not settings.use_wandb:
        yield lambda _step, _fields: None
        return
    names = await api.wandb_names()
    with await asyncio.to_thread(
        start_wandb,
        names.project,
        names.group,
        settings.model_dump(mode="json"),
        name=membership.wandb_name,
        one_record_per_step=False,  # reports come every few seconds
    ) as sink:
        yield lambda step, fields: sink.write(record(step, fields))


def record(step: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`{"failures": {"aborted": 1}}` → `{"step": 3, "env/failures/aborted": 1}`."""
    flat: dict[str, Any] = {"step": step}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= {f"{PREFIX}{name}/{key}": count for key, count in value.items()}
        elif value is not None:
            flat[name if name.startswith(EVALUATION) else PREFIX + name] = value
    return flat
