"""Commits to an engine that does not answer, and the reports about them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_core.settings import load_settings
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.ref import UNTRAINED, WeightKind, WeightRef
from grpo_core.weights.servers import REPORT_EVERY_S, ServerState, ServerStatus
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.engine import EngineDoesNotAnswer, EngineRefused
from grpo_vllm.supervisor.supervisor import Supervisor
from grpo_vllm.weights.served_store import ServedStore

V20 = PolicyVersion(2, 0)
BUSY, REFUSED = EngineDoesNotAnswer("no answer"), EngineRefused("no such route")


LOADED = WeightRef(version=V20, kind=WeightKind.CHECKPOINT, path=Path("/weights/2-0"))


class Engine:
    """Never finishes loading."""

    pid = 1

    def __init__(self, troubles: list[Exception]) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._troubles = iter(troubles)

    async def load(self, _weights: WeightRef) -> tuple[float, list[str]]:
        await asyncio.Event().wait()
        raise AssertionError

    async def rename_weights(self, _version: PolicyVersion) -> None:
        if (trouble := next(self._troubles, None)) is not None:
            raise trouble


def supervisor(versions: Any = None) -> Supervisor:
    settings: Any = load_settings(ServerSettings, ["--model", "some-model", "--redis-url", "none"])
    nothing: Any = None
    return Supervisor(settings, nothing, ServedStore(), nothing, versions)


@contextmanager
def under_way(work: Any) -> Iterator[asyncio.Task[Any]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("troubles", "is_torn"), [([BUSY], False), ([BUSY] * 1000, True), ([REFUSED], True)]
)
async def test_an_engine_that_is_busy_is_renamed_later_and_only_a_hung_one_is_replaced(
    troubles: list[Exception], is_torn: bool
) -> None:
    server, engine = supervisor(), Engine(troubles)
    with (
        under_way(server._take_commits(engine, [])) as serving,  # type: ignore[arg-type]
        under_way(server.commits.rename(V20)) as renaming,
    ):
        await asyncio.wait([serving, renaming], return_when=asyncio.FIRST_COMPLETED)
        assert (serving.done(), renaming.done()) == (is_torn, not is_torn)
        assert server.status().torn == is_torn
        assert (server.commits.version == V20) is not is_torn
        if is_torn:
            assert serving.result().weights.version == V20, "the next engine starts with it"


async def test_an_engine_that_ends_while_it_is_renamed_leaves_the_request_to_the_next_one() -> None:
    server, engine = supervisor(), Engine([BUSY] * 1000)
    with (
        under_way(server._take_commits(engine, [])) as serving,  # type: ignore[arg-type]
        under_way(server.commits.rename(V20)) as renaming,
    ):
        asyncio.get_running_loop().call_later(5.0, engine.ended.set_result, -9)
        assert await serving is None
        assert (server.status().torn, server.commits.version) == (0, UNTRAINED)
        with under_way(server._take_commits(Engine([]), [])):  # type: ignore[arg-type]
            await renaming
        assert server.commits.version == V20


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_a_stop_or_the_end_of_the_engine_ends_a_commit_at_once(is_stopped: bool) -> None:
    server, engine = supervisor(), Engine([])
    with (
        under_way(server._take_commits(engine, [])) as serving,  # type: ignore[arg-type]
        under_way(server.commits.commit(LOADED, restarts=False)),
    ):
        await asyncio.sleep(1.0)
        assert server.status().state is ServerState.COMMITTING
        server.stop() if is_stopped else engine.ended.set_result(-9)
        commit = await serving
    assert server.status().torn == (not is_stopped)
    assert (commit is None) is is_stopped
    assert is_stopped or commit.torn, "the next engine starts with the weights"


async def test_each_change_is_reported_at_once_and_never_out_of_order() -> None:
    clock, sent = asyncio.get_running_loop().time, list[tuple[float, str, int]]()

    class Versions:
        async def report(self, status: ServerStatus) -> None:
            await asyncio.sleep(0.25)
            sent.append((clock() - began, status.state.value, status.step))

    server = supervisor(Versions())
    began = clock()
    with under_way(server._report_for_ever()):
        await asyncio.sleep(0.5)
        server._enter(ServerState.SERVING)
        await asyncio.sleep(0.125)
        server._has_served(WeightRef(version=PolicyVersion(1, 5)))
        await server.report_now()
        await asyncio.sleep(REPORT_EVERY_S)
    assert sent[:3] == [
        (0.25, "starting", UNTRAINED.step),
        (0.75, "serving", UNTRAINED.step),
        (1.0, "serving", 5),
    ]
