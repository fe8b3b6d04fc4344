"""The process that decodes large submissions: it hangs, dies, or nobody waits for it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import psutil
import pytest

from grpo_api.decode_worker import DecodeWorker
from grpo_api.decoding import RawBody, decode_group
from grpo_api.errors import StoreUnavailable
from tests.integration.decode_processes import decode_processes
from tests.integration.run_api_calls import group
from tests.support.wait import wait_for_async

TURN_S = 60.0
DECODING_S = 600.0
DEADLINE_S = 120.0
BODY = RawBody(json.dumps(group(1)).encode() + b" " * 4_000_000, is_gzip=False)
"""More than the pipe to the process takes at once."""


class Clock:
    """The event loop's clock, which a test may put forward: what hangs is not waited for."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def time(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.time)
    return clock


@pytest.fixture
def worker() -> Iterator[DecodeWorker]:
    worker = DecodeWorker(8_000_000, turn_s=TURN_S, decoding_s=DECODING_S)
    yield worker
    left = processes()
    worker.close()
    for process in left:
        process.wait(DEADLINE_S)


def processes() -> list[psutil.Process]:
    return decode_processes(psutil.Process())


async def decode(worker: DecodeWorker) -> int:
    """How many sequences there were."""
    return sum(item.sequences for item in (await worker.run(decode_group, BODY)).groups)


async def hanging_process(worker: DecodeWorker) -> psutil.Process:
    assert await decode(worker) == 2
    (process,) = processes()
    process.suspend()
    return process


async def stuck(worker: DecodeWorker) -> asyncio.Task[int]:
    """A submission of which the process, which hangs, has been sent a part."""
    task = asyncio.create_task(decode(worker))
    assert worker._worker is not None
    pipe = worker._worker.pool._call_queue._reader  # type: ignore[attr-defined]
    await wait_for_async(pipe.poll)
    return task


async def test_a_process_that_hangs_is_replaced(worker: DecodeWorker, clock: Clock) -> None:
    process = await hanging_process(worker)
    hanging = await stuck(worker)
    clock.ahead_s += DECODING_S
    with pytest.raises(StoreUnavailable, match="is replaced; send the same groups again"):
        await hanging
    assert await decode(worker) == 2
    await wait_for_async(lambda: not process.is_running())
    assert len(processes()) == 1


async def test_a_process_that_dies_is_replaced(worker: DecodeWorker) -> None:
    process = await hanging_process(worker)
    hanging = await stuck(worker)
    process.kill()
    with pytest.raises(StoreUnavailable, match="ended; is memory short"):
        await hanging
    assert await decode(worker) == 2


async def test_submissions_that_wait_too_long_for_their_turn_are_refused(
    worker: DecodeWorker, clock: Clock
) -> None:
    process = await hanging_process(worker)
    hanging = await stuck(worker)
    behind = asyncio.create_task(decode(worker))
    await asyncio.sleep(0)  # it takes its place
    clock.ahead_s += TURN_S
    with pytest.raises(StoreUnavailable, match="arrived earlier were not decoded"):
        await behind
    process.resume()
    assert await hanging == 2


async def test_a_cancelled_request_leaves_its_turn_once_the_process_is_free(
    worker: DecodeWorker,
) -> None:
    process = await hanging_process(worker)
    cancelled = await stuck(worker)
    behind = asyncio.create_task(decode(worker))
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    process.resume()
    assert await behind == 2
    assert processes() == [process]


async def test_closing_does_not_wait_for_a_process_that_hangs(worker: DecodeWorker) -> None:
    process = await hanging_process(worker)
    hanging = await stuck(worker)
    worker.close()
    await wait_for_async(lambda: not process.is_running())
    with pytest.raises(StoreUnavailable):
        await hanging
