"""Real servers under load that restart, or of which one is killed: no request is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from grpo_core.clients.inference import GenerateAnswer
from grpo_core.wire.policy_version import PolicyVersion
from grpo_env.inference.pool import InferencePool
from grpo_env.inference.server import Home
from grpo_env.inference.waiting import wait_for_servers
from tests.fixtures.adapters import load
from tests.fixtures.file_sync import HandedOffServer
from tests.fixtures.inference import (
    FILE_MOVED,
    FILE_NOISE,
    START_DEADLINE_S,
    loads_in_place,
    start_inference,
    stop_inference,
)
from tests.inference.request_load import CLIENTS, load_on
from tests.support.wait import wait_for, wait_for_async

PROMPT = [5, 6, 7]


@pytest.mark.parametrize(
    ("mode", "restarts"),
    [
        ("plain", 1),
        pytest.param("lora", 1, marks=pytest.mark.full),
        pytest.param("plain", 3, marks=pytest.mark.full),
    ],
)
def test_no_request_fails_in_restarts_under_load(
    mode: str, restarts: int, request: pytest.FixtureRequest
) -> None:
    handed: HandedOffServer = request.getfixturevalue(mode)
    before = handed.server.status()
    versions = []
    with load_on(handed.server.url) as report:
        # The last ones first: weights that are served already cost no restart.
        for weights in reversed(handed.weights[:restarts]):
            report.wait_for_answers(CLIENTS + 1)  # so one began after the previous restart
            versions.append(handed.publish(weights, restarts=True))
        report.wait_for_answers(CLIENTS + 1)
    assert report.problems == []
    assert {tuple(version) for version in versions} <= set(report.versions)
    last, another = (load(handed.server.model, handed.weights[i]) for i in (0, 1))
    assert handed.difference(last, PROMPT) < FILE_NOISE
    assert handed.difference(another, PROMPT) > FILE_MOVED
    after = handed.server.status()
    assert after["restarts"] - before["restarts"] == restarts
    assert after["dropped_requests"] == 0
    assert after["crashes"] == before["crashes"]


def test_weights_are_loaded_under_load_without_a_restart(plain: HandedOffServer) -> None:
    before, versions = plain.server.status(), []
    with load_on(plain.server.url) as report:
        for weights in plain.weights[:2]:
            report.wait_for_answers(CLIENTS + 1)
            versions.append(plain.publish(weights))
        report.wait_for_answers(CLIENTS + 1)
    assert report.problems == []
    assert set(versions) <= set(report.versions)
    last, another = (load(plain.server.model, plain.weights[i]) for i in (1, 0))
    assert plain.difference(last, PROMPT) < FILE_NOISE
    assert plain.difference(another, PROMPT) > FILE_MOVED
    after = plain.server.status()
    assert (after["engine_pid"] == before["engine_pid"]) is loads_in_place()
    assert after["pause_s"] > 0
    assert after["bytes"] == 0, "used in place"


@pytest.mark.full
def test_a_server_that_was_stopped_answers_with_the_newest_weights_alone(
    plain: HandedOffServer,
) -> None:
    served = plain.publish(plain.weights[0])
    version = PolicyVersion(served.epoch, served.step + 1)
    shutil.copytree(plain.weights[1], plain.published(version))
    stopped = [plain.server.process.pid, plain.server.status()["engine_pid"]]
    with ThreadPoolExecutor(4) as pool:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        answers = [pool.submit(plain.sample, PROMPT) for _ in range(4)]
        plain.announcer.announce(version, plain.published(version))
        wait_for(lambda: plain.announcer.status() is None)  # it counts as gone
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)
        assert {tuple(answer.result()[2][0]) for answer in answers} == {tuple(version)}


@pytest.mark.full
def test_an_engine_that_is_killed_returns_with_the_newest_weights(plain: HandedOffServer) -> None:
    served = plain.publish(plain.weights[0])
    version = PolicyVersion(served.epoch, served.step + 1)
    shutil.copytree(plain.weights[1], plain.published(version))
    os.kill(plain.server.status()["engine_pid"], signal.SIGKILL)
    plain.announcer.announce(version, plain.published(version))
    assert plain.sample(PROMPT)[2] == [list(version)] * 2


GROUPS = 200
GROUP_SIZE = 4
TOKENS = 64


async def rollout(pool: InferencePool, first_token: int, answers: list[GenerateAnswer]) -> None:
    """Two turns of a conversation."""
    sampling = {"n": GROUP_SIZE, "max_tokens": TOKENS, "ignore_eos": True}
    prompt = [first_token, 5, 6]
    home = Home()
    first = await pool.generate(prompt, home, **sampling)
    answers.append(first)
    answers.append(await pool.generate(prompt + first.token_ids[0], home, **sampling))


@pytest.mark.full
async def test_no_group_is_lost_when_a_server_is_killed_while_the_other_restarts(
    plain: HandedOffServer, tiny_model: Path, tmp_path: Path
) -> None:
    doomed = await asyncio.to_thread(start_inference, tiny_model, tmp_path, shares=False)
    urls = [plain.server.url, doomed.url]
    answers: list[GenerateAnswer] = []
    try:
        await wait_for_servers(urls, START_DEADLINE_S)
        with capture_logs() as logs:

            def events(url: str) -> list[str]:
                return [entry["event"] for entry in logs if entry.get("url") == url]

            async with InferencePool(urls, START_DEADLINE_S, max_requests=GROUPS) as pool:
                work = [
                    asyncio.create_task(rollout(pool, number, answers)) for number in range(GROUPS)
                ]
                await wait_for_async(lambda: len(answers) > GROUPS // 4)
                restart = asyncio.create_task(
                    asyncio.to_thread(plain.publish, plain.weights[2], True)
                )
                await wait_for_async(lambda: plain.server.status()["state"] == "restarting")
                answers_before = len(answers)
                doomed.process.kill()
                version = await restart
                await asyncio.gather(*work)
    finally:
        stop_inference(doomed)
    assert answers_before < len(answers) == 2 * GROUPS
    sampled = [completion for answer in answers for completion in answer.completions()]
    assert len(sampled) == 2 * GROUPS * GROUP_SIZE
    assert {len(completion.token_ids) for completion in sampled} == {TOKENS}
    assert sampled[-1].last_version == version
    assert "server.failed" not in events(plain.server.url)
    assert events(doomed.url)[-1] == "server.failed"
