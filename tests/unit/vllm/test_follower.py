"""Followers of one run, in virtual time: what they serve, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from grpo_core.errors import ProtocolViolation
from grpo_core.settings import load_settings
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.version_log import Slot
from grpo_core.weights.versions import DELTA_SUFFIX, FileParts, VersionKind, sha256_of
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.follower import steps_between
from grpo_vllm.supervisor.joining import servable
from grpo_vllm.weights.fetch import CHUNK_DEADLINE_S, FETCH_DEADLINE_S
from grpo_vllm.weights.staging import NotFetched
from tests.support.virtual_time import VirtualTimeLoop
from tests.unit.vllm.run_in_memory import TRAINER, WEIGHTS, Log, Server, Shared

SOON_S, LONG_S = 5.0, 10_000.0


def v(step: int, epoch: int = 1) -> PolicyVersion:
    return PolicyVersion(epoch, step)


@contextlib.asynccontextmanager
async def following(*servers: Server) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(server.follower.follow()) for server in servers]
    try:
        await asyncio.sleep(SOON_S)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_server_joins_at_the_newest_version_and_follows_the_newest() -> None:
    run = Shared()
    for step in (1, 2):
        run.announce(v(step))
    server = Server(run)
    weights = await server.joins()
    assert weights is not None
    assert (weights.version, str(weights.path)) == (v(2), "/staging/1-2")
    assert not any("/1-1/" in url for url in run.asked)
    async with following(server):
        run.announce(v(3))
        run.announce(v(4), restarts=True)
        await asyncio.sleep(SOON_S)
    assert (server.served, server.engine.restarted) == (["1-4"], [True])
    assert server.follower.in_use == {"1-2", "1-4"}
    assert run.peers[v(4)] == {server.url}


async def test_a_fetch_that_is_slower_than_the_trainers_steps_still_joins() -> None:
    """The server samples once it has caught up."""
    run = Shared(delay_s=1.5)
    run.announce(v(1))
    server = Server(run)
    joining = asyncio.create_task(server.joins())
    for step in range(2, 5):
        await asyncio.sleep(2.0)
        run.announce(v(step))
    assert joining.done()
    assert joining.result() is not None
    server.follower.returned()  # its engine has started
    assert server.follower.behind != ""
    async with following(server):
        assert server.served == ["1-4"]
        assert server.follower.behind == ""
    assert set(server.copies.held) == {"1-1", "1-4"}


async def test_a_run_without_versions_has_nothing_to_join() -> None:
    server = Server(Shared())
    assert await server.joins() is None
    async with following(server):
        server.shared.announce(v(0), kind=VersionKind.BASE)
        await asyncio.sleep(SOON_S)
        server.shared.announce(v(0, epoch=2), kind=VersionKind.BASE)
        await asyncio.sleep(SOON_S)
    assert server.served == ["base"]
    assert server.engine.renamed == [v(0, epoch=2)]


async def test_copies_go_once_they_are_neither_served_nor_the_previous_ones_nor_in_use() -> None:
    run = Shared()
    run.announce(v(1))
    server = Server(run)
    await server.joins()
    server.engine.used = {"1-2"}
    async with following(server):
        for step in (2, 3, 4, 5):
            run.announce(v(step))
            await asyncio.sleep(SOON_S)
    assert set(server.copies.held) == {"1-2", "1-4", "1-5"}
    assert server.copies.discarded == ["1-1", "1-3"]
    assert run.peers[v(1)] == run.peers[v(3)] == set()


async def test_the_same_weights_under_a_new_epoch_get_only_its_name() -> None:
    run = Shared()
    run.announce(v(7), b"same")
    server = Server(run)
    await server.joins()
    asked = len(run.asked)
    async with following(server):
        run.announce(v(7, epoch=2), b"same")
        await asyncio.sleep(SOON_S)
        assert server.follower.in_use >= {"1-7", "2-7"}
    assert (server.served, server.engine.renamed) == ([], [v(7, epoch=2)])
    assert len(run.asked) == asked


async def test_the_base_model_of_another_model_is_refused() -> None:
    run = Shared()
    run.announce(v(0), kind=VersionKind.BASE, model="m")
    server = Server(run, check=servable(load_settings(ServerSettings, ["--model", "m"])))
    await server.joins()
    async with following(server):
        run.announce(v(0, epoch=2), kind=VersionKind.BASE, model="n")
        await asyncio.sleep(SOON_S)
    assert (server.engine.renamed, server.follower.progress.refused) == ([], "2-0")


async def test_a_chain_of_deltas_is_folded_if_that_is_less_than_the_full_file() -> None:
    """In the stand-in, a delta is its result, which must then be smaller than its file's size."""
    run = Shared()
    first = run.announce(v(1), b"1" * 9)
    servers = [Server(run, "a"), Server(run, "b")]
    for server in servers:
        await server.joins()
    async with following(servers[0]):
        second = run.announce(v(2), b"2" * 9, first, b"2" * 8)
        await asyncio.sleep(SOON_S)
    third = run.announce(v(3), b"3" * 9, second, b"3" * 3)
    assert third.parent == "1-2"
    run.asked.clear()
    async with following(*servers):
        pass
    deltas = [url.split("/")[-2] for url in run.asked if url.endswith(DELTA_SUFFIX)]
    assert deltas == ["1-3"], "the other server would fetch 11 bytes instead of 9"
    assert [server.served[-1] for server in servers] == ["1-3", "1-3"]


async def test_the_same_weights_are_loaded_again_if_an_operator_has_loaded_others() -> None:
    run = Shared()
    run.announce(v(7), b"same")
    server = Server(run)
    await server.joins()
    async with following(server):
        server.engine.version = v(0, epoch=2)
        run.announce(v(7, epoch=3), b"same")
        await asyncio.sleep(SOON_S)
    assert (server.served, server.engine.renamed) == (["3-7"], [])


async def test_versions_between_are_folded_too() -> None:
    run = Shared()
    first = run.announce(v(1), b"1" * 90)
    server = Server(run)
    await server.joins()
    second = run.announce(v(2), b"2" * 90, first, b"2" * 8)
    run.announce(v(3), b"3" * 90, second, b"3" * 9)
    async with following(server):
        pass
    asked = [url.split("/")[-2] for url in run.asked if url.endswith(DELTA_SUFFIX)]
    assert asked == ["1-2", "1-3"]
    assert server.served == ["1-3"]


async def test_a_delta_with_a_wrong_digest_is_replaced_by_the_full_file() -> None:
    run = Shared()
    first = run.announce(v(1), b"1" * 100)
    server = Server(run)
    await server.joins()
    run.announce(v(2), b"2" * 100, first, b"2" * 50)  # its result is not the announced one
    async with following(server):
        pass
    assert server.served == ["1-2"]
    assert server.copies.held["1-2"][WEIGHTS] == b"2" * 100
    assert server.fetcher.wrong_chunks == 1


async def test_a_missing_parent_costs_the_full_file() -> None:
    run = Shared()
    first = run.announce(v(1), b"1" * 100)
    lost = run.announce(v(2), b"2" * 100, first, b"2" * 50)
    run.announced.remove(lost)
    server = Server(run)
    await server.joins()
    run.announce(v(3), b"3" * 100, lost, b"3" * 50)
    async with following(server):
        pass
    assert server.served == ["1-3"]
    assert not any(url.endswith(DELTA_SUFFIX) for url in run.asked)


@pytest.mark.parametrize("damage", ["corrupt", "truncated", "missing", "silent"])
async def test_a_bad_source_is_left_for_another_one_and_counted(damage: str) -> None:
    run = Shared()
    announced = run.announce(v(1))
    bad, good = "http://bad/weights", "http://good/weights"
    right = {name: run.files[f"{TRAINER}/1-1/{name}"] for name in (WEIGHTS, "manifest.json")}
    wrong = {
        "corrupt": right | {WEIGHTS: b"X" * len(right[WEIGHTS])},
        "truncated": right | {WEIGHTS: right[WEIGHTS][:-1]},
        "missing": {"manifest.json": right["manifest.json"]},
        "silent": right,
    }
    run.put(bad, announced, wrong[damage])
    run.put(good, announced, right)
    run.silent = {f"{bad}/1-1/{WEIGHTS}"} if damage == "silent" else set()
    run.sources[v(1)], run.peers[v(1)] = {bad}, {good}
    server = Server(run)
    began = asyncio.get_running_loop().time()
    with capture_logs() as logs:
        await server.joins()
    assert server.copies.held["1-1"][WEIGHTS] == right[WEIGHTS]
    is_wrong = damage == "corrupt"
    assert (server.fetcher.wrong_chunks, server.fetcher.failed_sources) == (is_wrong, not is_wrong)
    events = {entry["event"] for entry in logs}
    assert ("weights.wrong_digest" if is_wrong else "source.failed") in events
    assert server.follower.progress.peer_bytes == len(right[WEIGHTS])
    if damage == "silent":
        assert asyncio.get_running_loop().time() - began == pytest.approx(CHUNK_DEADLINE_S)


async def test_a_manifest_that_was_not_announced_is_never_used() -> None:
    run = Shared()
    run.announce(v(1))
    run.files[f"{TRAINER}/1-1/manifest.json"] += b" "
    server = Server(run)
    with pytest.raises(NotFetched, match="announced digest"):
        await server.follower.join(waits=False)
    assert server.fetcher.wrong_chunks == 1


async def test_without_a_source_a_server_joins_only_at_a_newer_version() -> None:
    run = Shared()
    run.announce(v(1))
    run.sources[v(1)].clear()
    server = Server(run)
    joining = asyncio.create_task(server.joins())
    await asyncio.sleep(LONG_S)
    assert not joining.done()
    assert "no source has all files of policy version 1-1" in server.follower.progress.reason
    run.announce(v(2))
    weights = await joining
    assert weights is not None
    assert weights.version == v(2)


async def test_a_full_staging_directory_is_named_and_room_is_used_later() -> None:
    run = Shared()
    run.announce(v(1))
    server = Server(run)
    await server.joins()
    server.copies.room = 0
    with capture_logs() as logs:
        async with following(server):
            run.announce(v(2))
            await asyncio.sleep(10 * SOON_S)
            assert server.served == []
            assert "--staging-dir" in server.follower.progress.reason
            server.copies.room = None
            await asyncio.sleep(SOON_S)
    assert server.served == ["1-2"]
    assert [e["event"] for e in logs].count("staging.full") == 1, "logged once"


async def test_trouble_with_files_or_records_is_named_and_the_fetch_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Shared()
    run.announce(v(1))
    server = Server(run)
    await server.joins()
    troubles: list[Exception] = [OSError("not empty"), ProtocolViolation("a bad record")]
    finish = server.copies.finish

    async def fails(version: str, manifest: bytes) -> Path:
        if troubles:
            raise troubles.pop(0)
        return await finish(version, manifest)

    monkeypatch.setattr(server.copies, "finish", fails)
    with capture_logs() as logs:
        async with following(server):
            run.announce(v(2))
            await asyncio.sleep(SOON_S)
    assert server.served == ["1-2"]
    told = [entry["reason"] for entry in logs if entry["event"] == "weights.not_fetched"]
    assert told == ["policy version 1-2: not empty", "policy version 1-2: a bad record"]


async def test_a_version_that_the_engine_refuses_is_reported_and_the_next_one_is_served() -> None:
    run = Shared()
    run.announce(v(1))
    server = Server(run)
    await server.joins()
    server.engine.refuses = {"1-2"}
    async with following(server):
        run.announce(v(2))
        await asyncio.sleep(SOON_S)
        progress = server.follower.progress
        assert (progress.refused, progress.reason) == ("1-2", "the engine does not like it")
        assert server.follower.in_use == {"1-1"}
        run.announce(v(3))
        await asyncio.sleep(SOON_S)
        assert (progress.refused, progress.reason) == ("", "")
    assert server.served == ["1-3"]


async def test_others_know_what_is_fetched_before_it_is_used_and_at_once_what_is_refused() -> None:
    run = Shared()
    run.announce(v(1))
    server = Server(run)
    await server.joins()
    assert server.reports == [("1-1", "", 0)]
    server.engine.refuses = {"1-2"}
    asked = len(run.asked)
    async with following(server):
        run.announce(v(2))
        await asyncio.sleep(SOON_S)
    assert server.reports[1:] == [("1-2", "", asked), ("", "1-2", len(run.asked))]


async def test_a_fetch_that_is_overdue_closes_the_server_until_it_has_caught_up() -> None:
    run = Shared()
    run.announce(v(1))
    server = Server(run)
    await server.joins()
    async with following(server):
        assert server.follower.behind == ""
        for slot in (0, 1):
            run.slots[TRAINER, slot] = ("another", LONG_S)
        run.announce(v(2))
        await asyncio.sleep(FETCH_DEADLINE_S + SOON_S)
        assert "overdue" in server.follower.behind
        run.slots.clear()
        await asyncio.sleep(SOON_S)
        assert server.follower.behind == ""
    assert server.served == ["1-2"]


async def test_weights_older_than_the_limit_are_not_sampled() -> None:
    run = Shared()
    run.announce(v(1))
    server = Server(run, max_staleness=2)
    await server.joins()
    async with following(server):
        server.copies.room = 0
        for step in (2, 3, 4):
            run.announce(v(step))
            await asyncio.sleep(SOON_S)
            assert (server.follower.behind != "") == (step == 4)
        assert "--max-staleness allows 2" in server.follower.behind
        server.copies.room = None
        await asyncio.sleep(SOON_S)
        assert server.follower.behind == ""


async def test_weights_become_too_old_also_while_a_fetch_is_stuck() -> None:
    run = Shared()
    run.announce(v(1))
    server = Server(run, max_staleness=2)
    await server.joins()
    async with following(server):
        run.silent = {TRAINER}
        for step in (2, 3, 4):
            run.announce(v(step))
        await asyncio.sleep(SOON_S)
        assert "3 steps older than the newest (1-4)" in server.follower.behind


@pytest.mark.parametrize(
    ("served", "head", "steps"),
    [(v(3), v(5), 2), (v(3), v(3), 0), (v(5), v(3, epoch=2), 1), (v(3), v(9, epoch=2), 6)],
)
def test_staleness_counts_steps(served: PolicyVersion, head: PolicyVersion, steps: int) -> None:
    assert steps_between(served, head) == steps


async def test_after_an_absence_nothing_older_than_the_newest_version_is_sampled() -> None:
    """Versions were announced while the process was stopped."""
    run = Shared()
    run.announce(v(1))
    server = Server(run)
    server.follower.returned()
    assert server.follower.behind == "", "it knows of no version"
    await server.joins()
    server.follower.returned()
    assert server.follower.behind, "its engine took time to start"
    async with following(server):
        assert server.follower.behind == ""
        server.engine.commit_s = 3.0
        run.announce(v(2))
        server.follower.returned()
        await asyncio.sleep(1.0)
        assert "it first fetches the newest weights (1-2)" in server.follower.behind
        await asyncio.sleep(SOON_S)
        assert server.follower.behind == ""
        assert server.served == ["1-2"]
        server.follower.returned()
        await asyncio.sleep(1.0)
        assert server.follower.behind == ""


async def test_a_commit_that_began_before_the_absence_does_not_end_it() -> None:
    run = Shared()
    run.announce(v(1))
    server = Server(run)
    await server.joins()
    async with following(server):
        server.engine.commit_s = 3.0
        run.announce(v(2))
        await asyncio.sleep(1.0)
        run.announce(v(3))
        server.follower.returned()
        await asyncio.sleep(3.0)
        assert server.served == ["1-2"]
        assert server.follower.behind != ""
        await asyncio.sleep(SOON_S)
        assert server.served == ["1-2", "1-3"]
        assert server.follower.behind == ""


async def test_a_process_that_was_stopped_notices_it() -> None:
    run = Shared()
    run.announce(v(1))
    server = Server(run)
    await server.joins()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    async with following(server):
        server.engine.commit_s = 1.0
        run.announce(v(2))
        loop.stands_still_for(60.0)
        assert "this server was away" in server.follower.behind
        await asyncio.sleep(SOON_S)
        assert server.follower.behind == ""


async def test_after_a_while_without_redis_nothing_older_than_the_newest_version_is_sampled() -> (
    None
):
    run = Shared()
    run.announce(v(1))
    server = Server(run)
    await server.joins()
    async with following(server):
        server.log.answers.clear()
        await asyncio.sleep(LONG_S)
        run.announce(v(2))
        assert server.follower.behind == ""
        run.delay_s = 1.5
        server.log.answers.set()
        await asyncio.sleep(1.0)
        assert "it first fetches the newest weights (1-2)" in server.follower.behind
        await asyncio.sleep(SOON_S)
        assert server.follower.behind == ""
    assert server.served == ["1-2"]


async def test_a_flushed_log_changes_nothing_until_the_trainer_announces_again() -> None:
    run = Shared()
    for step in (1, 2):
        run.announce(v(step))
    server = Server(run)
    await server.joins()
    async with following(server):
        kept = run.announced.pop()
        run.announced.clear()
        server.follower.returned()
        await asyncio.sleep(LONG_S)
        assert server.follower.behind == ""
        run.append(kept)
        await asyncio.sleep(SOON_S)
        assert server.served == []
        run.announce(v(3))
        await asyncio.sleep(SOON_S)
    assert server.served == ["1-3"]


async def test_many_servers_take_most_bytes_from_each_other() -> None:
    run = Shared()
    announced = run.announce(v(1))
    servers = [Server(run, f"s{number}") for number in range(20)]

    async def read(url: str, first: int = 0, size: int | None = None) -> bytes:
        await asyncio.sleep(1.0)  # so that slots are held for a while
        for server in servers:
            if server.url in run.peers[v(1)]:
                server.publish()
        return await Shared.read(run, url, first, size)

    run.read = read  # type: ignore[method-assign]
    await asyncio.gather(*(server.joins() for server in servers))
    of_trainer = [url for url in run.asked if url == f"{TRAINER}/{announced.id}/{WEIGHTS}"]
    assert 2 <= len(of_trainer) < 12
    assert sum(server.follower.progress.peer_bytes > 0 for server in servers) == 20 - len(
        of_trainer
    )


async def test_a_waiting_server_tries_the_slots_of_a_few_others_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Shared()
    run.announce(v(1))
    run.peers[v(1)] = {f"http://{number}/weights" for number in range(100)}
    tried: list[list[str]] = []

    async def take_slot(_self: Log, sources: list[str]) -> Slot | None:
        tried.append(sources)
        return Slot(TRAINER, 0) if len(tried) > 1 else None

    monkeypatch.setattr(Log, "take_slot", take_slot)
    await Server(run).joins()
    assert [source == TRAINER for source in tried[0]] == [True, False, False, False]
    assert len({*tried[0]}) == len(tried[1]) == 4


async def test_a_slot_that_another_server_has_taken_is_not_used_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Shared()
    monkeypatch.setattr("grpo_core.weights.versions.CHUNK_BYTES", 4)
    content = b"12345678"
    parts = FileParts(bytes=8, chunks=(sha256_of(content[:4]), sha256_of(content[4:])))
    monkeypatch.setattr("tests.unit.vllm.run_in_memory.parts_of", lambda _content: parts)
    run.announce(v(1), content)
    taken = 0
    take_slot = Log.take_slot

    async def counted(self: Log, sources: list[str]) -> Slot | None:
        nonlocal taken
        taken += 1
        return await take_slot(self, sources)

    monkeypatch.setattr(Log, "take_slot", counted)
    server = Server(run)
    renew_slot, calls = Log.renew_slot, 0

    async def lost_after_a_chunk(self: Log, slot: Slot) -> bool:
        nonlocal calls
        calls += 1
        return False if calls == 2 else await renew_slot(self, slot)

    monkeypatch.setattr(Log, "renew_slot", lost_after_a_chunk)
    await server.joins()
    assert taken == 2
    assert server.copies.held["1-1"][WEIGHTS] == content


async def test_a_server_that_ends_is_no_source_any_more() -> None:
    run = Shared()
    run.announce(v(1))
    server = Server(run)
    await server.joins()
    assert run.peers[v(1)] == {server.url}
    await server.follower.close()
    assert run.peers[v(1)] == set()
