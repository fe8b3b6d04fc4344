"""Fetching from real HTTP servers into real directories, with the slots in a real Redis.
`tests/unit/vllm/test_follower.py` tests which sources are asked, and when.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from grpo_core.weights import versions as core_versions
from grpo_core.weights.delta import write_delta
from grpo_core.weights.version_log import ServerVersionLog, VersionLog
from grpo_core.weights.versions import DELTA_SUFFIX, Announcement, VersionKind, version_id
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.http_server import require_api_key, serving
from grpo_vllm.supervisor.host import _listening
from grpo_vllm.weights import staging as staging_module
from grpo_vllm.weights.fetch import Fetcher, HttpTransport, Staged
from grpo_vllm.weights.staging import NotFetched, Staging, StagingFull
from tests.fixtures.announcer import described
from tests.support.wait import DEADLINE_S

KEY = SecretStr("secret")
NAME = "model.safetensors"
WORDS = 5000


class Rig:
    """A trainer's directory behind HTTP, and a fetcher that does not see the directory."""

    def __init__(self, directory: Path, log: VersionLog, server: ServerVersionLog) -> None:
        self.trainer, self.staging = directory / "trainer", directory / "staging"
        self.log = log
        self.url = ""
        staging = Staging(self.staging, directory / "own")
        self.transport = HttpTransport(KEY)
        self.fetcher = Fetcher(server, self.transport, staging, "http://me/weights")

    async def file(self, request: Request) -> Response:
        path = self.trainer / request.path_params["version"] / request.path_params["file"]
        return FileResponse(path) if path.is_file() else Response(status_code=404)

    def write(self, step: int, parent: Announcement | None = None) -> Announcement:
        """Announce a version whose words differ in a few places from the parent's."""
        version = PolicyVersion(1, step)
        directory = self.trainer / version_id(version)
        directory.mkdir(parents=True)
        words = np.arange(WORDS, dtype=np.uint16)
        words[: 10 * step] += 7
        (directory / NAME).write_bytes(words.tobytes())
        (directory / "config.json").write_text("{}")
        kind = {}
        if parent is not None:
            before = self.trainer / parent.id / NAME
            write_delta(before, directory / NAME, directory / (NAME + DELTA_SUFFIX))
            kind = {"kind": VersionKind.DELTA, "parent": parent.id}
        announced = described(directory, version, **kind)
        self.log.announce(announced, [self.url])
        return announced

    def same(self, staged: Staged) -> bool:
        """Whether the copy has the bytes of the trainer's file."""
        assert staged.directory == self.staging / staged.announced.id
        trainers = self.trainer / staged.announced.id
        return all(
            (staged.directory / n).read_bytes() == (trainers / n).read_bytes() for n in NAMES
        )


NAMES = (NAME, "config.json", "manifest.json")


@pytest.fixture
async def rig(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Rig]:
    monkeypatch.setattr(core_versions, "CHUNK_BYTES", 1000)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which nobody chose for the weights
    monkeypatch.delenv("no_proxy", raising=False)
    run_id = uuid.uuid4().hex
    async with AsyncExitStack() as stack:
        log = stack.enter_context(VersionLog(redis_url, run_id, DEADLINE_S))
        server = await stack.enter_async_context(ServerVersionLog(redis_url, run_id, "a"))
        rig = Rig(tmp_path, log, server)
        await stack.enter_async_context(rig.transport)
        app = Starlette(routes=[Route("/weights/{version}/{file}", rig.file)])
        listening = stack.enter_context(_listening("127.0.0.1", 0))
        await stack.enter_async_context(serving(require_api_key(app, KEY), listening))
        rig.url = f"http://127.0.0.1:{listening.getsockname()[1]}/weights"
        yield rig


async def test_a_version_is_fetched_in_chunks_and_its_successor_as_a_delta(rig: Rig) -> None:
    first = rig.write(1)
    whole = await rig.fetcher.fetch(first, {})
    assert rig.same(whole)
    assert (whole.bytes, whole.peer_bytes, whole.in_place) == (2 * WORDS + 2, 0, False)
    second = rig.write(2, first)
    third = rig.write(3, second)
    folded = await rig.fetcher.fetch(third, {first.id: whole})
    assert rig.same(folded)
    assert 0 < folded.bytes < 500
    assert sorted(p.name for p in rig.staging.iterdir()) == ["1-1", "1-3"]
    left = {path.name for path in (rig.staging / "1-3").iterdir()}
    assert left == {*NAMES, NAME + DELTA_SUFFIX}, "others may fetch the delta from here"


async def test_a_corrupt_delta_costs_the_full_file_in_the_next_attempt(rig: Rig) -> None:
    first = rig.write(1)
    held = {first.id: await rig.fetcher.fetch(first, {})}
    second = rig.write(2, first)
    delta = rig.trainer / second.id / (NAME + DELTA_SUFFIX)
    delta.write_bytes(b"X" * delta.stat().st_size)
    with pytest.raises(NotFetched, match="wrong digest"):
        await rig.fetcher.fetch(second, held)
    assert rig.same(await rig.fetcher.fetch(second, held))
    assert rig.fetcher.wrong_chunks == 1


async def test_a_directory_on_this_host_is_used_in_place_once_it_is_verified(
    rig: Rig, tmp_path: Path
) -> None:
    first, rig.url = rig.write(1), (tmp_path / "own").as_uri()
    (tmp_path / "own").mkdir()
    rig.log.announce(first, [rig.url])
    assert rig.same(await rig.fetcher.fetch(first, {})), "the directory is not there"
    rig.trainer = tmp_path / "own"
    second = rig.write(2)
    staged = await rig.fetcher.fetch(second, {})
    assert (staged.directory, staged.in_place) == (tmp_path / "own" / "1-2", True)
    third = rig.write(3)
    os.truncate(tmp_path / "own" / "1-3" / NAME, 100)
    with pytest.raises(NotFetched, match="differs from the announced file"):
        await rig.fetcher.fetch(third, {})
    assert rig.fetcher.wrong_chunks == 1


async def test_a_directory_elsewhere_and_a_host_that_is_gone_are_no_sources(rig: Rig) -> None:
    for step, url in enumerate((rig.trainer.as_uri(), "http://127.0.0.1:1/weights"), 1):
        rig.url = url
        announced = rig.write(step)
        missing = f"no source has all files of policy version 1-{step}"
        with pytest.raises(NotFetched, match=missing):
            await rig.fetcher.fetch(announced, {})


async def test_a_full_staging_directory_is_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    announced = rig.write(1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(staging_module.os, "fdopen", full)
    with pytest.raises(StagingFull, match="start the server with --staging-dir"):
        await rig.fetcher.fetch(announced, {})
    assert list(rig.staging.iterdir()) == []
