"""Prompts of a data set that are too long to be asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpo_env.producer import NoPromptFits
from grpo_env.tasks import Item, KeptItems, Message
from grpo_env.tasks.arithmetic import Sum
from grpo_env.tasks.shuffled import Shuffled
from tests.unit.env.canned import generate_answer, inference_routes
from tests.unit.env.feeding import Sevens, feed
from tests.unit.env.http_stub import Answer
from tests.unit.env.scripted_run_api import RunApi


class LongAndShort(Sevens):
    """A data set of prompts with 1 to 100 tokens."""

    def __init__(self) -> None:
        self._stream = Shuffled([Sum(0, n) for n in range(1, 101)], seed=0)
        self.kept: list[KeptItems] = []

    def next_item(self) -> Sum:
        return self._stream.next()

    def keep(self, fits: Callable[[Item], bool]) -> KeptItems:
        self.kept.append(self._stream.keep(fits))
        return self.kept[-1]


class PromptsOfLengthB:
    def encode(self, messages: Sequence[Message]) -> list[int]:
        return [5] * int(messages[0]["content"].strip("=").partition("+")[2])


async def long_and_short(max_token_length: int) -> tuple[LongAndShort, list[int]]:
    """The task after a short run, and the lengths of the prompts that were sent."""
    api, task = RunApi(num_steps=3), LongAndShort()

    def generate(body: dict[str, Any]) -> Answer:
        ids = body["prompt"]["prompt_token_ids"]
        return 200, generate_answer(["7", "8"], prompt_token_ids=ids)

    seen = await feed(
        api.routes(),
        inference_routes(generate),
        *(f"--env.max-token-length={max_token_length}", "--env.drop-equal-scores=false"),
        task=task,
        prompts=PromptsOfLengthB(),
    )
    bodies = seen.inference.bodies("POST /generate")
    return task, [len(body["prompt"]["prompt_token_ids"]) for body in bodies]


async def test_prompts_without_room_for_a_completion_are_skipped_beforehand() -> None:
    # 4 tokens of completion below 40 leave 35 for the prompt.
    task, lengths = await long_and_short(max_token_length=40)

    assert task.kept == [KeptItems(kept=35, skipped=65)]
    assert lengths
    assert max(lengths) <= 35


async def test_the_trainer_s_smaller_limit_counts_too() -> None:
    # Its 50 tokens leave 45 for the prompt.
    task, lengths = await long_and_short(max_token_length=2048)

    assert task.kept == [KeptItems(kept=100, skipped=0), KeptItems(kept=45, skipped=55)]
    assert max(lengths) <= 45


async def test_a_data_set_without_a_prompt_that_fits_ends_the_work() -> None:
    with pytest.raises(NoPromptFits, match="none of 100 prompts leaves room for 4 tokens of compl"):
        await long_and_short(max_token_length=5)
