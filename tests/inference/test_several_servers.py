"""Several real servers that an environment uses: one restarts, another is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from grpo_core.clients.inference import GenerateAnswer
from grpo_env.inference.health import wait_for_servers
from grpo_env.inference.pool import Conversation, InferencePool
from tests.fixtures.file_sync import HandedOffServer
from tests.fixtures.inference import START_DEADLINE_S, start_inference, stop_inference
from tests.support.wait import wait_for_async

GROUPS = 200
GROUP_SIZE = 4
TOKENS = 64


async def rollout(session: Conversation, first_token: int, answers: list[GenerateAnswer]) -> None:
    """Two turns of a conversation."""
    sampling = {"n": GROUP_SIZE, "max_tokens": TOKENS, "ignore_eos": True}
    prompt = [first_token, 5, 6]
    first = await session.generate(prompt, **sampling)
    answers.append(first)
    answers.append(await session.generate(prompt + first.token_ids[0], **sampling))


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
                    asyncio.create_task(rollout(pool.session(), number, answers))
                    for number in range(GROUPS)
                ]
                await wait_for_async(lambda: len(answers) > GROUPS // 4)
                restart = asyncio.create_task(asyncio.to_thread(plain.publish, plain.weights[1]))
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
