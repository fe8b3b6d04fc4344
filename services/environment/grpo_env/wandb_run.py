"""The environment's own run in Weights & Biases, in the trainer's project and group."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.wandb_run.sink import WandbRun, start_wandb
from grpo_env.config.settings import EnvServerSettings
from grpo_env.registration import Membership

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
    run = WandbRun(
        project=names.project,
        group=names.group,
        name=membership.wandb_name,
        config=settings.model_dump(mode="json"),
        one_record_per_step=False,  # reports come every few seconds
    )
    with await asyncio.to_thread(start_wandb, run) as sink:
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
