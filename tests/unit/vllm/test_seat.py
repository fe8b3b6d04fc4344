"""Commits to an engine that does not answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from grpo_core.weights.servers import ServerState
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.engine import EngineDoesNotAnswer, EngineRefused
from grpo_vllm.supervisor.seat import EngineSeat, SupervisorState

V20 = PolicyVersion(2, 0)
BUSY, REFUSED = EngineDoesNotAnswer("no answer"), EngineRefused("no such route")


@pytest.mark.parametrize(
    ("troubles", "is_torn"), [([BUSY], False), ([BUSY] * 1000, True), ([REFUSED], True)]
)
async def test_an_engine_that_is_busy_is_renamed_later_and_only_a_hung_one_is_replaced(
    troubles: list[Exception], is_torn: bool
) -> None:
    left = iter(troubles)

    class Engine:
        async def rename_weights(self, _version: PolicyVersion) -> None:
            if (trouble := next(left, None)) is not None:
                raise trouble

    async def save() -> None:
        pass

    state = SupervisorState()
    state.phase = ServerState.SERVING
    seat = EngineSeat(state, SimpleNamespace(engine=Engine()), save)  # type: ignore[arg-type]
    renaming = asyncio.create_task(seat.rename(V20))
    requested = asyncio.create_task(state.requested.wait())
    await asyncio.wait([renaming, requested], return_when=asyncio.FIRST_COMPLETED)
    assert (seat.torn, state.restart is not None) == (is_torn, is_torn)
    assert (state.weights.version == V20) is not is_torn
    for task in (renaming, requested):
        task.cancel()
