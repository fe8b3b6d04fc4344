"""The engine samples only while the supervisor says that its weights are new enough."""

from __future__ import annotations

import asyncio

from grpo_core.weights.servers import ABSENT_AFTER_S
from grpo_vllm.middleware import FollowGate


def test_requests_pass_while_the_supervisor_says_so() -> None:
    now = 0.0
    gate = FollowGate(follows=True, clock=lambda: now)
    refusal = gate.refusal()
    assert refusal is not None
    assert refusal.hold
    gate.note(behind="", hold=False, head="1-5", staged="1-4")
    assert gate.refusal() is None
    assert (gate.head, gate.staged) == ("1-5", "1-4")
    now = ABSENT_AFTER_S + 1  # the supervisor was stopped
    refusal = gate.refusal()
    assert refusal is not None
    assert refusal.hold
    gate.note(behind="too old", hold=False, head="1-5", staged="1-4")
    refusal = gate.refusal()
    assert refusal is not None
    assert (refusal.reason, refusal.hold) == ("too old", False)


async def test_a_server_that_follows_nobody_is_open() -> None:
    assert FollowGate(follows=False).refusal() is None
    before = asyncio.get_running_loop().time()
    await FollowGate(follows=True).wait(1000.0)
    assert asyncio.get_running_loop().time() - before < 1.0
