"""An environment's own run in W&B: the real package, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_core.errors import WandbUnavailable
from tests.unit.env.canned import inference_routes
from tests.unit.env.feeding import RunApi, feed, right_and_wrong
from tests.unit.env.http_stub import Answer

NAMES = {"group": "trainers-group", "project": "trainers-project"}


class Numbering(RunApi):
    """As run-api does, it adds a number to the name of an environment."""

    def register(self, body: dict[str, Any]) -> Answer:
        return super().register(body | {"desired_name": f"{body['desired_name']}_0"})


async def logged(*options: str) -> None:
    routes = Numbering(num_steps=2).routes() | {"GET /wandb_info": lambda _body: (200, NAMES)}
    await feed(routes, inference_routes(right_and_wrong), *options)


async def test_an_environment_logs_under_its_name_to_the_trainers_project_and_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    await logged("--env.use_wandb", "true", "--env.wandb_name", "my-environment")
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = log.read_bytes()
    for word in (*NAMES.values(), "my-environment_0", "env/mean_reward", "env/groups_sent"):
        assert word.encode() in written


async def test_an_environment_leaves_the_run_if_wandb_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    api = RunApi(num_steps=2)
    routes = api.routes() | {"GET /wandb_info": lambda _body: (200, NAMES)}
    with pytest.raises(WandbUnavailable, match="omit --use-wandb"):
        await feed(routes, inference_routes(right_and_wrong), "--use-wandb")
    assert api.disconnected == [0]
