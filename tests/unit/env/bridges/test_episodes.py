"""Rollouts in environments with actions: their turns, scores and ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_env.bridges.episodes import EpisodeTask, Observation, Result, action_text
from grpo_env.tasks import Answer, ContextFull, Graded, Message, Row, TaskOptions
from tests.unit.env.bridges.scripted import ScriptedDialogue


class Counter:
    """Each action earns its number of characters; `stop` ends the episode."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    async def reset(self) -> Observation:
        return Observation([{"role": "user", "content": self.greeting}])

    async def act(self, answer: Answer) -> Observation:
        if answer == "break":
            raise ZeroDivisionError
        done = answer == "stop"
        seen: list[Message] = [{"role": "user", "content": f"read {answer}"}]
        return Observation(seen, float(len(answer)), done, "said stop" if done else "")

    async def result(self) -> Result:
        return Result({"state/size": 2.0}, reward=0.5)


class Counting(EpisodeTask):
    def __init__(self, *greetings: str, system_prompt: str = "", **arguments: Any) -> None:
        options = TaskOptions(system_prompt=system_prompt, args=arguments)
        super().__init__("counting", options)
        self.greetings = [*greetings] or ["begin"]
        self.open = 0

    @asynccontextmanager
    async def episode(self, row: Row) -> AsyncIterator[Counter]:  # noqa: ARG002
        self.open += 1
        try:
            yield Counter(self.greetings.pop(0) if len(self.greetings) > 1 else self.greetings[0])
        finally:
            self.open -= 1


async def test_answers_become_actions_and_what_the_environment_shows_the_next_message() -> None:
    task = Counting(system_prompt="Be brief.")
    dialogue = ScriptedDialogue("ab", "stop", "never")
    graded = await task.run({"seed": 3}, dialogue)
    parts = {"state/size": 2.0, "turns": 2.0, "last_reward": 4.0}
    assert graded == Graded(parts, "said stop", score=6.5)
    assert dialogue.requests[-1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "begin"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "read ab"},
    ]


@pytest.mark.parametrize(
    ("arguments", "texts", "turns", "reason"),
    [
        ({"max_turns": 2}, ("a", "b", "c"), 2, "turn limit"),
        ({}, ("a", "b", "c"), 3, "context full"),
    ],
)
async def test_an_episode_without_an_end_counts_as_far_as_it_went(
    arguments: dict[str, Any], texts: Sequence[str], turns: int, reason: str
) -> None:
    dialogue = ScriptedDialogue(*texts)
    graded = await Counting(**arguments).run({"seed": 0}, dialogue)
    assert (graded.score, graded.parts["turns"], graded.reason) == (turns + 0.5, turns, reason)
    assert dialogue.last_answer.finished == (reason != "context full")


@pytest.mark.parametrize(("texts", "error"), [((), ContextFull), (("break",), ZeroDivisionError)])
async def test_an_error_closes_the_episode(texts: Sequence[str], error: type[Exception]) -> None:
    task = Counting()
    with pytest.raises(error):
        await task.run({"seed": 0}, ScriptedDialogue(*texts))
    assert task.open == 0


async def test_rollouts_of_a_row_that_begin_differently_are_reported_once() -> None:
    task = Counting("begin", "begin", "other", "third")
    with capture_logs() as logs:
        for _ in range(4):
            await task.run({"seed": 7}, ScriptedDialogue("stop"))
    assert [(log["event"], log["row"]) for log in logs] == [
        ("episodes.beginnings_differ", {"seed": 7})
    ]


def test_the_rows_are_seeds() -> None:
    assert Counting(episodes=2, first_seed=5).rows("train") == [{"seed": 5}, {"seed": 6}]
    with pytest.raises(ValueError, match="counting has no argument episode; it has episodes"):
        Counting(episode=2)


@pytest.mark.parametrize(
    ("answer", "part", "text"),
    [
        (" up \n", "", "up"),
        ("<think>left? [1]</think>\n\nup", "", "up"),
        ("First ```a``` then\n```python\nx = 1\n```\nand\n```\ny\n```", "code", "y"),
        ("```python\nprint(1)", "code", "print(1)"),
        ("no code", "code", "no code"),
        ("<guess>3</guess> or <guess>\n4 </guess>", "guess", "4"),
        ("I say <guess>5", "guess", "5"),
        ("5", "guess", "5"),
    ],
)
def test_the_part_of_an_answer_that_is_the_action(answer: str, part: str, text: str) -> None:
    assert action_text(answer, part) == text
