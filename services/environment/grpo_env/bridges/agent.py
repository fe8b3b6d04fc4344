"""The task `agent`: rollouts are conducted by a program or a function of the user, which reaches
the policy through the API of OpenAI or Anthropic, and rated by any reward."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from grpo_core.temporary import temporary_directory
from grpo_env.bridges.agent_program import Agent, AgentEnd, Client
from grpo_env.bridges.chat import Chat
from grpo_env.bridges.endpoint import ChatEndpoint, HeldOpen
from grpo_env.tasks import Answer, Dialogue, Reward, RolloutFailed, Row, Split, Task, TaskOptions
from grpo_env.tasks.rows import PROMPT_COLUMNS

OUTPUT = "output"
"""The key of `answer.state` that holds what the agent printed or returned."""
_BEARER = "Bearer "


@dataclass(frozen=True)
class AgentArguments:
    """Arguments of the task.

    command: starts a program; function: a Python function, as `my.py:agent`; one of both is set.
    reward: the function that rates, or a task whose data and reward are used.
    calls, tokens, deadline_s: limits of a rollout; rollouts: of those at the same time.
    sequences: largest number of token sequences of a rollout.
    """

    reward: str
    calls: int
    deadline_s: float
    rollouts: int
    sequences: int
    command: str | None = None
    function: str = ""
    tokens: int | None = None

    @classmethod
    def divided(cls, args: Mapping[str, Any]) -> tuple[AgentArguments, dict[str, Any]]:
        """These arguments, and those of the reward."""
        names = {field.name for field in fields(cls)}
        own = {name: value for name, value in args.items() if name in names}
        return cls(**own), {name: value for name, value in args.items() if name not in names}


class AgentTask(Task):
    """See the module.

    Args:
        agent: conducts the rollouts
        rewards: supplies rows and rewards
    """

    drives_itself = True
    names_prompts = True
    max_sequences_option = "--agent-sequences"

    def __init__(
        self, options: TaskOptions, how: AgentArguments, agent: Agent, rewards: Task
    ) -> None:
        self.name = "agent"
        super().__init__(options)
        self._how, self._agent, self._rewards = how, agent, rewards
        self.max_sequences = how.sequences
        self.weights, self.held_out = rewards.weights, rewards.held_out
        self.blocks, self.has_process = rewards.blocks, rewards.has_process  # type: ignore[misc]
        self._places = asyncio.Semaphore(how.rollouts)
        self._endpoint = ChatEndpoint("Authorization")
        self._socket = Path()
        self._serving = HeldOpen(self._served)

    def rows(self, split: Split) -> Sequence[Row] | None:
        self._agent.load()  # the environment starts
        return self._rewards.rows(split)

    def prompt(self, row: Row) -> str:
        """Names the row where prompts are shown. The agent writes its own prompts."""
        found = (row[name] for name in PROMPT_COLUMNS if isinstance(row.get(name), str))
        return next(found, "")

    def reward(self, answer: Answer, row: Row) -> Any:
        return self._rewards.reward(answer, row)

    @property
    def has_async_reward(self) -> bool:
        return self._rewards.has_async_reward

    async def run(self, row: Row, dialogue: Dialogue) -> Reward | None:
        chat = Chat(dialogue, self._how.calls, self._how.tokens)
        async with self._places:
            ended = await self._conducted(row, chat)
        chat.finish()
        if ended.problem and not (chat.is_cut_off and ended.is_own):
            raise RolloutFailed(ended.problem)
        if chat.last is None:
            raise RolloutFailed(f"the agent ended without a call; its output: {ended.output}")
        chat.last.state[OUTPUT] = ended.output
        return None

    async def _conducted(self, row: Row, chat: Chat) -> AgentEnd:
        await self._serving.wait()
        key = f"grpo-{secrets.token_urlsafe(24)}"
        self._endpoint.sessions[_BEARER + key] = chat
        try:
            client = Client(self._endpoint.url, key, self._socket)
            running = asyncio.ensure_future(self._agent.run(row, client, self._how.deadline_s))
            chat.on_failure = running.cancel
            return await running
        except asyncio.CancelledError:
            if chat.failed is not None:  # which ended the agent
                raise chat.failed from None
            raise
        finally:
            del self._endpoint.sessions[_BEARER + key]
            await chat.close()

    def close(self) -> None:
        self._serving.close()
        self._rewards.close()

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        with temporary_directory() as directory:
            self._socket = directory / "endpoint.sock"
            async with self._endpoint:
                await self._endpoint.listen_at(self._socket)
                yield
