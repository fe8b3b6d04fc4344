"""What atroposlib's environment base asks of run-api, call by call."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from sums_environment import SumsEnvironment

PROMPT_TOKENS = 2


class RecordingEnvironment(SumsEnvironment):
    """Implements the one-completion hook, and notes how large its bodies are."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[Any] = []
        self.body_bytes: list[int] = []
        self.turn = 0

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        """The base builds the group, with `[]` and `{}` for everything that is not here."""
        self.turn += 1
        return {"tokens": [item, 5], "masks": [-100, 5], "scores": float(self.turn)}, []

    def _post_json_with_compression(
        self, session: Any, url: str, payload: Any, **options: Any
    ) -> Any:
        self.sent.append(payload)
        self.body_bytes.append(len(json.dumps(payload)))
        return super()._post_json_with_compression(session, url, payload, **options)


def group(tokens: int, **changes: Any) -> dict[str, Any]:
    """Two sequences, as environments with log-probabilities build them."""
    sampled = list(range(100, 100 + tokens))
    return {
        "tokens": [[1, 2, *sampled]] * 2,
        "masks": [[-100] * PROMPT_TOKENS + sampled] * 2,
        "inference_logprobs": [[1.0] * PROMPT_TOKENS + [-0.5] * tokens] * 2,
        "scores": [0.0, 1.0],
        "group_overrides": {},
        **changes,
    }


async def calls(url: str, tokenizer: str) -> dict[str, Any]:
    config = BaseEnvConfig(
        rollout_server_url=url, tokenizer_name=tokenizer, wandb_name="calls", group_size=2
    )
    unused = APIServerConfig(api_key="x", base_url="http://127.0.0.1:9/v1")
    env = RecordingEnvironment(config, [unused])
    await env.setup_wandb()
    await env.register_env()
    await env.get_server_info()
    await env.get_status()

    await env.handle_send_to_api(group(3))
    await env.handle_send_to_api(group(200))
    await env.handle_send_to_api([group(3), group(4)])
    built_by_base, _ = await BaseEnv.collect_trajectories(env, 7)
    await env.handle_send_to_api(built_by_base)
    accepted = await queue_size(url)
    await env.handle_send_to_api(group(3, inference_logprobs=[[1.0, 1.0]] * 2))
    return {
        "env_id": env.env_id,
        "name": env.wandb_prepend,
        "wandb": [env.wandb_project, env.wandb_group],
        "batch_size": env.config.batch_size,
        "max_token_len": env.max_token_len,
        "status": env.status_dict,
        "sent": env.sent,
        "body_bytes": env.body_bytes,
        "queue_before_refusal": accepted,
        "queue_after_refusal": await queue_size(url),
    }


async def queue_size(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status") as answer:
        return (await answer.json())["queue_size"]
