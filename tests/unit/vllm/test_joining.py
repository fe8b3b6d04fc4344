"""The weights of a server's first engine, when versions are announced."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.directory_checks import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    UnusableWeights,
)
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.servers import ServerState, ServerStatus
from grpo_core.weights.versions import Announcement, VersionKind
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.joining import UnlikeOthers, WrongKind, WrongModel, joined, servable
from grpo_vllm.weights.fetch import Staged
from grpo_vllm.weights.served_store import ServedWeights
from tests.unit.vllm.fake_engine import Record
from tests.unit.vllm.run_in_memory import Log, Server, Shared

V15, V20 = PolicyVersion(1, 5), PolicyVersion(2, 0)
NAMED = ("--run-id", "day")


async def first(
    run: Shared, record: Record, *flags: str, server: Server | None = None
) -> WeightRef:
    server = server or Server(run)
    settings = load_settings(ServerSettings, ["--model", "m", *flags])
    return await joined(settings, record, Log(run), server.follower)  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [(), NAMED])
async def test_the_newest_version_is_served(flags: tuple[str, ...]) -> None:
    run = Shared()
    run.announce(V15)
    found = await first(run, Record(), *flags)
    assert (found.version, found.kind) == (V15, WeightKind.CHECKPOINT)


@pytest.mark.parametrize("flags", [(), NAMED, ("--no-await-weights",)])
async def test_an_untrained_policy_keeps_its_name(flags: tuple[str, ...]) -> None:
    run = Shared()
    run.announce(V15, kind=VersionKind.BASE)
    assert await first(run, Record(), *flags) == WeightRef(version=V15)


@pytest.mark.parametrize("flags", [(), ("--no-await-weights", *NAMED)])
async def test_the_model_is_served_under_a_new_epoch_where_nobody_waits(
    flags: tuple[str, ...],
) -> None:
    """Without a source, in a run that nobody named; or as the operator demands."""
    run, record = Shared(), Record()
    server = Server(run)
    run.announce(V15)
    run.sources.clear()
    assert await first(run, record, *flags, server=server) == WeightRef(version=V20)
    assert record.saved == [ServedWeights(WeightRef(version=V20), model="m")]
    following = asyncio.create_task(server.follower.follow())
    await asyncio.sleep(10.0)
    assert server.served == [], "the version that it could not serve"
    run.announce(PolicyVersion(3, 1))
    await asyncio.sleep(10.0)
    assert server.served == ["3-1"]
    following.cancel()


async def test_a_named_run_without_a_source_is_waited_for() -> None:
    run = Shared()
    run.announce(V15)
    run.sources.clear()
    server = Server(run)
    joining = asyncio.create_task(first(run, Record(), *NAMED, server=server))
    await asyncio.sleep(1000.0)
    assert not joining.done()
    told = server.follower.progress.reason
    assert "--no-await-weights or with another --run-id" in told
    run.announce(V20)
    assert (await joining).version == V20


async def test_a_server_starts_without_the_redis_that_nobody_named() -> None:
    run, record = Shared(), Record()
    run.announce(V15)
    record.unread = True
    assert await first(run, record) == WeightRef()


@pytest.mark.parametrize(
    ("kind", "flags", "told"),
    [
        (VersionKind.ADAPTER, (), "is an adapter; start the server with --enable-lora"),
        (VersionKind.FULL, ("--enable-lora",), "is a whole model; start the server without"),
        (VersionKind.BASE, ("--enable-lora",), None),
        (VersionKind.ADAPTER, ("--enable-lora",), None),
        (VersionKind.DELTA, (), None),
    ],
)
async def test_versions_of_the_other_kind_are_no_use(
    kind: VersionKind, flags: tuple[str, ...], told: str | None
) -> None:
    check = servable(load_settings(ServerSettings, ["--model", "m", *flags]))
    staged = Staged(Announcement(epoch=1, step=5, kind=kind), None)
    if told is None:
        await check(staged)
    else:
        with pytest.raises(WrongKind, match=told):
            await check(staged)


@pytest.mark.parametrize("kind", [VersionKind.BASE, VersionKind.FULL])
async def test_versions_of_another_model_are_never_served(kind: VersionKind) -> None:
    check = servable(load_settings(ServerSettings, ["--model", "here/m"]))
    for model in ("", "elsewhere/m"):
        await check(Staged(Announcement(epoch=1, step=5, kind=kind, model=model), None))
    with pytest.raises(WrongModel, match="belongs to n, but this server serves here/m"):
        await check(Staged(Announcement(epoch=1, step=5, kind=kind, model="n"), None))


async def test_a_server_of_another_model_begins_anew_with_its_own() -> None:
    run, record = Shared(), Record()
    server = Server(run, check=servable(load_settings(ServerSettings, ["--model", "m"])))
    run.announce(V15, kind=VersionKind.BASE, model="n")
    assert await first(run, record, *NAMED, server=server) == WeightRef(version=V20)


@pytest.mark.parametrize(
    ("state", "epoch", "begins_anew"),
    [("serving", 1, False), ("committing", 1, False), ("starting", 1, True), ("serving", 2, True)],
)
async def test_a_server_of_another_model_is_refused_if_others_serve_the_run(
    state: str, epoch: int, begins_anew: bool
) -> None:
    """Its new policy version would draw all requests."""
    run, record = Shared(), Record()
    server = Server(run, check=servable(load_settings(ServerSettings, ["--model", "m"])))
    run.announce(V15, model="n")
    run.others = [ServerStatus(name="b", state=ServerState(state), epoch=epoch, step=5)]
    joining = first(run, record, *NAMED, server=server)
    if begins_anew:
        assert await joining == WeightRef(version=V20)
    else:
        with pytest.raises(UnlikeOthers, match=r"belongs to n, but this server serves m.*has b"):
            await joining
        assert record.saved == []


async def test_an_adapter_is_checked_once_it_is_there(tmp_path: Path) -> None:
    check = servable(load_settings(ServerSettings, ["--model", "m", "--enable-lora"]))
    staged = Staged(Announcement(epoch=1, step=5, kind=VersionKind.ADAPTER), tmp_path)
    with pytest.raises(UnusableWeights, match=r"missing: adapter_config\.json"):
        await check(staged)
    (tmp_path / ADAPTER_WEIGHTS).touch()
    (tmp_path / ADAPTER_CONFIG).write_text('{"r": 64}')
    with pytest.raises(UnusableWeights, match="has rank 64"):
        await check(staged)
