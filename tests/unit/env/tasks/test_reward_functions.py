"""Rewards written for TRL or verl."""

from __future__ import annotations

from typing import Any

from grpo_env.tasks import Answer, Graded
from grpo_env.tasks.reward_functions import as_reward

MESSAGES = [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "7"}]


def test_a_reward_for_trl_gets_texts_or_messages_as_the_prompt_is() -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, answer: Any = None) -> list[float]:
        seen.append((prompts, completions, answer))
        return [0.5]

    said = Answer("7", messages=MESSAGES)  # type: ignore[arg-type]
    rows = [{"prompt": "3+4=", "answer": "7", "id": 1}, {"prompt": MESSAGES[:1], "answer": "7"}]
    assert {as_reward(reward)(said, row) for row in [*rows, {"question": "3+4="}]} == {0.5}
    assert seen == [
        (["3+4="], ["7"], ["7"]),
        ([MESSAGES[:1]], [MESSAGES[1:]], ["7"]),
        (["3+4="], ["7"], None),
    ]


def test_a_reward_for_trl_may_look_at_the_tokens_only() -> None:
    class Shorter:
        def __call__(self, completion_ids: list[list[int]], **_columns: Any) -> list[float]:
            return [-float(len(ids)) for ids in completion_ids]

    assert as_reward(Shorter())(Answer("7", token_ids=(1, 2)), {}) == -2.0


async def test_a_reward_for_verl_gets_the_right_answer() -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> Any:
        assert extra_info is None
        return {"score": float(solution_str == ground_truth), "acc": True, "pred": data_source}

    async def compute_later(solution_str: str, ground_truth: str) -> Any:
        return {"score": float(solution_str == ground_truth), "acc": 1.0}

    row = {"data_source": "sums", "answer": "7", "prompt": []}
    assert as_reward(compute_score)(Answer("7"), row) == Graded({"acc": True}, score=1.0)
    row = {"answer": "a solution", "reward_model": {"ground_truth": "7"}}
    assert await as_reward(compute_later)(Answer("7"), row) == Graded({"acc": 1.0}, score=1.0)


def test_other_functions_stay_as_they_are() -> None:
    def reward(answer: Answer, row: Any) -> float:  # noqa: ARG001
        return 1.0

    assert as_reward(reward) is reward
    assert as_reward(max) is max
