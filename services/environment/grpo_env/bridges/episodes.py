"""Environments that are reset, and then answer one action after the other.

The policy's answer becomes an action, and what the environment shows becomes the next message. The
score of a rollout is the sum of the rewards of its actions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from grpo_env.maths.final_answer import END_OF_THINKING
from grpo_env.tasks import (
    Answer,
    ContextFull,
    Dialogue,
    Graded,
    Message,
    Row,
    Split,
    Task,
    TaskOptions,
)

log = structlog.get_logger()

_CODE = re.compile(r"^```[^\n`]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
CODE = "code"
SEED = "seed"


@dataclass(frozen=True)
class Observation:
    """What an environment shows after a reset or an action.

    messages: new ones for the policy; reward: of the action; done: the episode has ended; reason:
    why, for the reader of rollouts.
    """

    messages: Sequence[Message]
    reward: float = 0.0
    done: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """How an episode ended: for any reason, also the limit of turns or of the context.

    facts: numbers for the report; reward: of the whole episode, beside those of its actions.
    """

    facts: Mapping[str, float] = field(default_factory=dict)
    reward: float = 0.0


class Episode(Protocol):
    """One rollout in the environment."""

    tools: Sequence[Mapping[str, Any]]
    """Their JSON schemas, which the chat template shows. Known after `reset`."""

    async def reset(self) -> Observation:
        """Begin. Raises `RolloutFailed`, `EnvironmentLost`."""

    async def act(self, answer: Answer) -> Observation:
        """Make an action of the policy's answer. Raises `RolloutFailed`, `EnvironmentLost`."""

    async def result(self) -> Result:
        """Asked for once, at the end. Raises `RolloutFailed`, `EnvironmentLost`."""


class EpisodeTask(Task):
    """Conducts rollouts in an environment. The base class of those of OpenEnv, TextArena and
    Harbor.

    arguments: the user's `--task-args` over `defaults`.
    """

    drives_itself = True
    blocks = False
    defaults: Mapping[str, Any] = {"episodes": 1000, "first_seed": 0, "max_turns": 50, "action": ""}

    def __init__(self, name: str, options: TaskOptions) -> None:
        self.name = name
        super().__init__(options)
        self.arguments = self.checked_arguments(**self.defaults)
        self.max_turns = int(self.arguments["max_turns"])
        self._first: dict[str, Sequence[Message]] = {}

    def episode(self, row: Row) -> AbstractAsyncContextManager[Episode]:
        """Open an episode; it is closed in every case."""
        raise NotImplementedError

    def score(self, rewards: Sequence[float]) -> float:
        """The score of a rollout. rewards: [turns]"""
        return sum(rewards)

    def rows(self, split: Split) -> Sequence[Row] | None:
        """The seeds of the episodes."""
        if split == "test":
            return None
        first = int(self.arguments["first_seed"])
        return [{SEED: first + i} for i in range(int(self.arguments["episodes"]))]

    async def run(self, row: Row, dialogue: Dialogue) -> Graded:
        """Conduct one rollout and rate it.

        Raises:
            RolloutFailed: the environment ended the rollout with an error.
            ContextFull: the first message alone is too long.
            EnvironmentLost: the environment does not answer any more.
        """
        async with self.episode(row) as episode:
            shown = await episode.reset()
            self._compare(row, shown.messages)
            messages = [*self._opening(), *shown.messages]
            rewards: list[float] = []
            reason = "turn limit"
            while not shown.done and len(rewards) < self.max_turns:
                try:
                    answer = await dialogue.say(messages, episode.tools)
                except ContextFull:
                    if not rewards:
                        raise
                    dialogue.cut_off()
                    reason = "context full"
                    break
                shown = await episode.act(answer)
                rewards.append(shown.reward)
                messages = [*answer.messages, *shown.messages]
            result = await episode.result()
        last = (rewards or [0.0])[-1]
        parts = {**result.facts, "turns": float(len(rewards)), "last_reward": last}
        score = self.score(rewards) + result.reward
        return Graded(parts, shown.reason or reason, score=score)

    def _opening(self) -> list[Message]:
        prompt = self.options.system_prompt
        return [{"role": "system", "content": prompt}] if prompt else []

    def _compare(self, row: Row, messages: Sequence[Message]) -> None:
        """Log the first row whose rollouts begin differently: their scores are not comparable."""
        key = repr(sorted(row.items()))
        known = self._first.setdefault(key, messages)
        if [*known] != [*messages] and "" not in self._first:
            self._first[""] = ()
            log.warning(
                "episodes.beginnings_differ",
                task=self.name,
                row=dict(row),
                hint="equal rows must begin equal episodes; draw from the seed of the reset",
            )


def action_text(answer: str, part: str = "") -> str:
    """The part of an answer that is the action, without the policy's thoughts.

    Args: part: `code` for the last fenced block, another word for the last element `<word>`, empty
        for everything. An answer without such a part counts as a whole.
    """
    said = answer.rpartition(END_OF_THINKING)[2]
    if part == CODE:
        found = _CODE.findall(said)
    elif part:
        found = re.findall(rf"<{re.escape(part)}>(.*?)(?:</{re.escape(part)}>|\Z)", said, re.DOTALL)
    else:
        found = []
    return str(found[-1] if found else said).strip()
