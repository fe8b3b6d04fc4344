"""An agent on a real vLLM: every sequence holds the very tokens that the server saw, in all turns,
drafts and calls side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_core.clients.inference import BridgeClient
from grpo_core.tree.environment_values import AGENT
from grpo_core.wire.fields import MASKED
from grpo_env.inference.pool import InferencePool
from grpo_env.loading import find_task
from grpo_env.rollout.chat_template import load_template
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.rollout.grader import Grader
from grpo_env.rollout.groups import SampledGroup
from grpo_env.rollout.task_code import TaskCode
from grpo_env.tasks import TaskOptions
from tests.fixtures.inference import InferenceServer
from tests.unit.env.rollout.rig import PLAN, item_of, submitted

NOISE = 1e-4
AGENT_FILE = """
import asyncio
import httpx
from openai import AsyncOpenAI

async def agent(row, client):
    http = httpx.AsyncClient(verify=False)
    policy = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, http_client=http)
    asked = [{"role": "user", "content": row["prompt"]}]

    async def ask(*messages):
        answer = await policy.chat.completions.create(model=client.model, messages=messages)
        return answer.choices[0].message.model_dump(include={"role", "content"})

    said = await ask(*asked)
    await asyncio.gather(*(ask(*asked, said, {"role": "user", "content": q}) for q in ("1", "2")))
    response = await policy.responses.create(model=client.model, input=row["prompt"])
    await policy.responses.create(
        model=client.model, input="3", previous_response_id=response.id, max_output_tokens=3
    )
    await ask(*asked, {"role": "assistant", "content": "a draft"}, *asked)
    await http.aclose()

def reward(answer, row):
    return 1.0
"""


async def rolled_out(server: InferenceServer, file: Path) -> SampledGroup:
    limits = {"calls": 8, "deadline_s": 120.0, "rollouts": 2, "sequences": 4}
    args = {"command": None, "function": f"{file}:agent", "reward": f"{file}:reward", **limits}
    rows = file.with_name("rows.jsonl")
    task = find_task(AGENT)(TaskOptions(data=str(rows), args=args))
    plan = replace(PLAN, temperature=1.0, max_sequences=4, drop_equal_scores=False)
    async with InferencePool([server.url], 60.0, 8) as pool:
        with TaskCode(60.0) as code:
            template = load_template(str(server.model))
            engine = RolloutEngine(pool.generate, template, Grader({}, code))
            outcome = await engine.roll_out(item_of(task), plan)
    task.close()
    return outcome


async def test_every_sequence_has_the_logprobs_of_its_own_tokens(
    shared_server: InferenceServer, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(AGENT_FILE)
    file.with_name("rows.jsonl").write_text('{"prompt": "3+4="}\n')

    group = submitted(await rolled_out(shared_server, file))

    assert group.overrides
    sampled = [o["rollout_index"] for o in group.overrides if o["finish_reason"] != "padding"]
    # The first conversation, its branch, the one of responses, and the one with the draft
    assert sampled == [0] * 4 + [1] * 4
    client = BridgeClient(shared_server.url)
    for tokens, mask, logprobs in zip(
        group.tokens, group.masks, group.inference_logprobs, strict=True
    ):
        trained = [at for at, token in enumerate(mask) if token != MASKED]
        assert trained
        served = client.prompt_logprobs(tokens)
        assert [logprobs[at] for at in trained] == pytest.approx(
            [served[at - 1] for at in trained], abs=NOISE
        )
    client.close()
