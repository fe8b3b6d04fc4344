"""The process that decodes large submissions, where it hangs and where nobody waits for it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from grpo_api.decode_worker import DecodeWorker
from grpo_api.decoding import RawBody, decode_group
from grpo_api.errors import StoreUnavailable
from tests.integration.decode_processes import decode_processes
from tests.integration.run_api_calls import group

DECODING_S = 60.0
DEADLINE_S = 120.0
SUSPENDED_S = 0.5
BODY = RawBody(json.dumps(group(1)).encode() + b" " * 4_000_000, is_gzip=False)
"""More than the pipe to the process takes at once."""


class Clock:
    """The event loop's clock, which a test may put forward: what hangs is not waited for."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def time(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def worker() -> Iterator[DecodeWorker]:
    worker = DecodeWorker(8_000_000, turn_s=10 * DECODING_S, decoding_s=DECODING_S)
    yield worker
    left = processes()
    worker.close()
    for process in left:
        process.wait(DEADLINE_S)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.time)
    return clock


def processes() -> list[psutil.Process]:
    return decode_processes(psutil.Process())


async def until(found: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not found():
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.01)


async def decode(worker: DecodeWorker) -> int:
    """How many sequences there were."""
    return sum(item.sequences for item in (await worker.run(decode_group, BODY)).groups)


async def test_a_process_that_hangs_is_replaced(worker: DecodeWorker, clock: Clock) -> None:
    assert await decode(worker) == 2
    (first,) = processes()
    first.suspend()
    hanging, behind = (asyncio.create_task(decode(worker)) for _ in range(2))
    await asyncio.sleep(SUSPENDED_S)
    clock.ahead_s += DECODING_S
    with pytest.raises(StoreUnavailable, match="is replaced; send the same groups again"):
        await hanging
    assert await behind == 2
    await until(lambda: not first.is_running())
    assert len(processes()) == 1


async def test_those_who_wait_for_their_turn_are_told_so() -> None:
    worker = DecodeWorker(8_000_000, turn_s=0.1, decoding_s=DEADLINE_S)
    first = asyncio.create_task(decode(worker))
    await asyncio.sleep(0)
    try:
        with pytest.raises(StoreUnavailable, match="arrived earlier were not decoded"):
            await decode(worker)
        assert await first == 2
    finally:
        worker.close()


async def test_a_request_that_is_cancelled_leaves_its_turn_once_the_process_is_free(
    worker: DecodeWorker, clock: Clock
) -> None:
    assert await decode(worker) == 2
    (process,) = processes()
    process.suspend()
    cancelled, behind = (asyncio.create_task(decode(worker)) for _ in range(2))
    await asyncio.sleep(SUSPENDED_S)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    clock.ahead_s += DECODING_S
    # what is left to the one behind is its own time, not what remains of the other's
    assert await behind == 2
    assert processes() != [process]


async def test_closing_does_not_wait_for_a_process_that_hangs(worker: DecodeWorker) -> None:
    assert await decode(worker) == 2
    (process,) = processes()
    process.suspend()
    hanging = asyncio.create_task(decode(worker))
    await asyncio.sleep(SUSPENDED_S)
    worker.close()
    await until(lambda: not process.is_running())
    with pytest.raises(StoreUnavailable):
        await hanging
