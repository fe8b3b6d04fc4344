"""An engine joins the process group of a trainer that names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_core.weights.collective import GroupAddress
from grpo_vllm.engine.control import EngineControl
from tests.unit.vllm.fake_engine import FakeEngine

JOINING = "init_weight_transfer_engine"


def address_for(pid: int, token: str = "t") -> str:
    return GroupAddress(
        host="localhost",
        port=1,
        token=token,
        backend="gloo",
        silent_s=1.0,
        size=2,
        servers={"a": (pid, 1)},
    ).model_dump_json()


@pytest.mark.parametrize(
    ("addresses", "loads_weights", "joined"),
    [
        ([""], True, 0),
        ([address_for(os.getpid())] * 2, True, 1),
        ([address_for(os.getpid()), address_for(os.getpid(), "u")], True, 2),
        # Of the engine before this one, or of another server.
        ([address_for(os.getpid() + 1)], True, 0),
        ([address_for(os.getpid())], False, 0),
    ],
)
async def test_once_and_only_if_the_group_names_it(
    addresses: list[str], loads_weights: bool, joined: int
) -> None:
    control = EngineControl(engine := FakeEngine(), loads_weights=loads_weights)
    for address in addresses:
        await control.join_group(address, "a", Path("/staging"))
        await control.join_group(address, "b", Path("/staging"))
    assert engine.calls == [JOINING] * joined
