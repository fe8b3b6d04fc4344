"""What atroposlib's client of the inference server asks of it, call by call."""

from __future__ import annotations

from typing import Any

import tenacity
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager

QUESTION = [{"role": "user", "content": "3+4="}]
MAX_TOKENS = 6


async def calls(base_url: str, model: str) -> dict[str, Any]:
    config = APIServerConfig(
        server_type="vllm", base_url=base_url, model_name=model, api_key="x", timeout=60
    )
    manager = ServerManager([config])
    return {
        "chat": await chat(manager),
        "text": await text(manager),
        "native": await native(manager),
        "turns": await turns(manager),
        "refused": await refused(manager),
    }


async def chat(manager: ServerManager) -> list[str]:
    """/v1/chat/completions: the finish reasons."""
    answer = await manager.chat_completion(messages=QUESTION, n=3, max_tokens=MAX_TOKENS)
    return [choice.finish_reason for choice in answer.choices]


async def text(manager: ServerManager) -> list[str]:
    """/v1/completions: the finish reasons."""
    answer = await manager.completion(prompt="3+4=", n=3, max_tokens=MAX_TOKENS)
    return [choice.finish_reason for choice in answer.choices]


async def native(manager: ServerManager) -> dict[str, Any]:
    """/generate; more completions than the manager asks for at once."""
    prompt, tokens, logprobs, reasons = await manager.tokens_and_logprobs_completion(
        prompt="3+4=", n=10, max_tokens=MAX_TOKENS, temperature=0.7, top_p=1.0, stop=["9"]
    )
    return {"prompt": prompt, "tokens": tokens, "logprobs": logprobs, "reasons": reasons}


async def turns(manager: ServerManager) -> list[dict[str, Any]]:
    """Two turns with the manager's bookkeeping, then the same tokens scored as a prompt."""
    async with manager.managed_server() as managed:
        options = {"n": 1, "max_tokens": MAX_TOKENS, "temperature": 1.0}
        first = await managed.chat_completion(messages=QUESTION, **options)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        await managed.chat_completion(messages=[*QUESTION, said, *QUESTION], **options)
        nodes = managed.get_state()["nodes"]
    return [{**node.model_dump(), "scored": await scored(manager, node.tokens)} for node in nodes]


async def scored(manager: ServerManager, tokens: list[int]) -> list[float | None]:
    """Log-probability of each token after those before it; None for the first."""
    answer = await manager.get_logprobs(input_ids=list(tokens), top_k=1)
    entries = zip(answer["prompt_topk_token_ids"], answer["prompt_topk_logprobs"], strict=True)
    return [
        dict(zip(ids, values, strict=True)).get(token)
        for token, (ids, values) in zip(tokens, entries, strict=True)
    ]


async def refused(manager: ServerManager) -> int:
    """The status of a request with a parameter that no version of vLLM knows."""
    try:
        await manager.tokens_and_logprobs_completion(prompt="3+4=", max_tokens=1, nonsense=1)
    except tenacity.RetryError as error:
        return error.last_attempt.exception().status
    return 200
