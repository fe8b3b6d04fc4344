"""When a server reports its status."""

from __future__ import annotations

import asyncio

from grpo_core.weights.ref import UNTRAINED, WeightRef
from grpo_core.weights.servers import REPORT_EVERY_S, ServerState, ServerStatus
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.reporter import Reporter
from grpo_vllm.supervisor.seat import SupervisorState


async def test_each_change_is_reported_at_once_and_never_out_of_order() -> None:
    state = SupervisorState()
    clock, sent = asyncio.get_running_loop().time, list[tuple[float, str, int]]()

    def status() -> ServerStatus:
        return ServerStatus(name="a", state=state.phase, **state.weights.version.fields())

    async def send(status: ServerStatus) -> None:
        await asyncio.sleep(0.25)
        sent.append((clock() - began, status.state.value, status.step))

    reporter = Reporter(status, state.news)
    reporter.send = send
    began = clock()
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(0.5)
    state.phase = ServerState.SERVING
    await asyncio.sleep(0.125)
    state.has_served(WeightRef(version=PolicyVersion(1, 5)))
    await reporter.now()
    await asyncio.sleep(REPORT_EVERY_S)
    running.cancel()
    assert sent[:3] == [
        (0.25, "starting", UNTRAINED.step),
        (0.75, "serving", UNTRAINED.step),
        (1.0, "serving", 5),
    ]
