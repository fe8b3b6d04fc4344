"""The task of a recipe: its data sets, its prompts and its rewards."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from grpo_env.maths.final_answer import require_short
from grpo_env.tasks import Answer, Graded, Message, Row, Split, Task, TaskOptions
from grpo_env.tasks.reward_functions import SINGLE, RewardInvalid, graded_of
from grpo_env.tasks.rows import ANSWER, answer_text, is_missing, messages_of
from grpo_runs.recipe.data import RecipeData
from grpo_runs.recipe.rewards import COMPARING, close_rewards, find_reward, right_answer

TASK = "grpo_runs.recipe.task:RecipeTask"
SOLUTION_COLUMNS = (ANSWER, "final_answer", "solution")
_END_OF_ANSWER = "</answer>"
_DEFAULTS: Mapping[str, Any] = {"data": None, "rewards": ["exact_answer"], "stop": []}


class RecipeTask(Task):
    """Arguments: data: those of `RecipeData`; rewards: names; stop: texts that end a completion."""

    name = "recipe"

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        arguments = self.checked_arguments(**_DEFAULTS)
        self._data = RecipeData.of_arguments(arguments["data"])
        self._rewards = {name: find_reward(name) for name in arguments["rewards"]}
        self.stop = tuple(arguments["stop"])

    def rows(self, split: Split) -> Sequence[Row] | None:
        found = self._data.rows(split)
        return None if found is None else [_with_answer(row) for row in found]

    def prompt(self, row: Row) -> Sequence[Message]:
        compared = self._rewards.keys() & COMPARING
        if compared and ANSWER not in row:
            raise ValueError(
                f"no column for the answer; expected one of {', '.join(SOLUTION_COLUMNS)}, found "
                f"{', '.join(row)}; name it with dataset_solution_column"
            )
        if compared - {"exact_completion"}:
            require_short(right_answer(row))
        elif compared:
            answer_text(row[ANSWER])
        return messages_of(row, self.options.system_prompt)

    def reward(self, answer: Answer, row: Row) -> Graded | Awaitable[Graded]:
        """The score is 0 plus what `reward_weights` make of the rewards by their names."""
        whole = self._with_end(answer)
        values = {name: reward(whole, row) for name, reward in self._rewards.items()}
        if any(inspect.isawaitable(value) for value in values.values()):
            return _awaited(values, row)
        return _graded(values, row)

    def _with_end(self, answer: Answer) -> Answer:
        """The server leaves out the text that ended a completion."""
        is_open = answer.rfind("<answer>") > answer.rfind(_END_OF_ANSWER)
        if is_open and answer.finished and _END_OF_ANSWER in self.stop:
            return Answer(answer + _END_OF_ANSWER, **vars(answer))
        return answer

    def close(self) -> None:
        close_rewards()


def _with_answer(row: Row) -> Row:
    found = next((name for name in SOLUTION_COLUMNS if not is_missing(row.get(name))), None)
    return row if found in (None, ANSWER) else {**row, ANSWER: row[found]}


async def _awaited(values: Mapping[str, Any], row: Row) -> Graded:
    found = {
        name: await value if inspect.isawaitable(value) else value for name, value in values.items()
    }
    return _graded(found, row)


def _graded(values: Mapping[str, Any], row: Row) -> Graded:
    """Each reward as one part, and each of its own parts as `<reward>.<part>`, which counts only in
    its sum. None: the reward does not apply to this row."""
    parts: dict[str, float | None] = {}
    reasons = [f"expected {row[ANSWER]}"] if ANSWER in row else []
    for name, value in values.items():
        parts[name] = None
        if value is None:
            continue
        graded = graded_of(value)
        own = {part: number for part, number in graded.parts.items() if number is not None}
        parts[name] = sum(own.values()) if graded.score is None else graded.score
        if own.keys() - {SINGLE}:
            parts |= {f"{name}.{part}": number for part, number in own.items()}
        reasons += [graded.reason] if graded.reason else []
    if all(number is None for number in parts.values()):
        raise RewardInvalid("every reward of reward_funcs returned None for this row")
    return Graded(parts, "; ".join(reasons), score=0.0)
