"""One-digit sums on atroposlib's `BaseEnv`, written the way its own environments are.

    python sums_environment.py serve --env.<option> ... --openai.<option> ...

Knows nothing of this project. Run by the interpreter that has atroposlib.
"""

from __future__ import annotations

import logging
import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

LARGEST_DIGIT = 9
MAX_ANSWER_TOKENS = 16


class SumsEnvironment(BaseEnv):
    name = "sums"

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        # A list: from a bare APIServerConfig the command line's --openai.base_url is not taken.
        return BaseEnvConfig(wandb_name="sums"), [APIServerConfig(server_type="vllm")]

    async def setup(self) -> None:
        self.random = random.Random(0)

    async def get_next_item(self) -> tuple[int, int]:
        return self.random.randint(0, LARGEST_DIGIT), self.random.randint(0, LARGEST_DIGIT)

    async def collect_trajectories(self, item: tuple[int, int]) -> tuple[Any, list[Any]]:
        a, b = item
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=[{"role": "user", "content": f"{a}+{b}="}],
                n=self.config.group_size,
                max_tokens=MAX_ANSWER_TOKENS,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        texts = [choice.message.content for choice in answer.choices]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[float(text.strip() == str(a + b)) for text in texts],
        )
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to evaluate: `BaseEnv` calls this every `steps_per_eval` steps."""


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(created).3f %(levelname)s %(message)s")
    SumsEnvironment.cli()
