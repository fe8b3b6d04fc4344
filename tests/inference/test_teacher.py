"""A real server as the teacher of itself: it scores sampled tokens with their logprobs, and other
tokenizers are refused."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from grpo_core.clients.inference import GenerateAnswer
from grpo_core.errors import RequestRefused
from grpo_env.rollout.teacher import TeacherClient, TeacherTokenizerDiffers
from tests.fixtures.inference import InferenceServer
from tests.support.wait import DEADLINE_S

PROMPT = [*range(5, 45)]


async def test_a_server_scores_its_own_tokens_as_it_sampled_them(
    shared_server: InferenceServer, tiny_model: Path
) -> None:
    sampling = {"n": 4, "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, **sampling}
    sampled = GenerateAnswer.model_validate(
        httpx.post(f"{shared_server.url}/generate", json=body).raise_for_status().json()
    ).completions()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    async with TeacherClient(shared_server.url, None, DEADLINE_S, 8, None) as teacher:
        await teacher.find_model(DEADLINE_S)
        await teacher.require_same_tokenizer(tokenizer)
        scored = await teacher.logprobs([PROMPT + one.token_ids for one in sampled])
        assert [len(row) for row in scored] == [len(PROMPT) + 11] * 4
        for row, one in zip(scored, sampled, strict=True):
            assert row[-12:] == pytest.approx(one.logprobs, abs=1e-4)
        with pytest.raises(RequestRefused, match="maximum context length"):
            await teacher.logprobs([[5] * 600])
        tokenizer.add_tokens([f"more{i}" for i in range(300)])
        with pytest.raises(TeacherTokenizerDiffers, match="out of vocabulary"):
            await teacher.require_same_tokenizer(tokenizer)
