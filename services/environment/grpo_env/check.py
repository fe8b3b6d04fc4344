"""`env-server check my.py:reward`: grades a few answers and prints a table."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_core.rollouts.record import printable
from grpo_env.assembly import TaskSet, open_engine, open_template, sampling_plan, task_code
from grpo_env.rollout.chat_template import answered, divided
from grpo_env.rollout.grading import Grade, Grader, Ungraded
from grpo_env.rollout.groups import GroupLost
from grpo_env.settings import EnvServerSettings
from grpo_env.tasks import Answer, State
from grpo_env.tasks.items import Item, all_items

ANSWERS = 8
_ITEMS = 2
_SERVER_DEADLINE_S = 5.0
_WIDTH = 80


class AnswersUnusable(GrpoError):
    """The file of `--answers` cannot be read, or names a row that the data does not have."""


class RewardWrong(GrpoError):
    """At least one answer could not be sampled or graded."""


@dataclass(frozen=True)
class Checked:
    """One answer with its grade."""

    item: Item
    answer: str
    grade: Grade | Ungraded


def check(settings: EnvServerSettings, tasks: TaskSet) -> None:
    """Print the prompt, the answer, the score, its parts and the reason of each answer.

    Raises:
        AnswersUnusable: see there.
        RewardWrong: an answer could not be graded. The table names the problem.
        GrpoError: the task, its data or the server is unusable.
    """
    items = all_items(tasks.tasks[0])
    if settings.answers is None:
        checked = asyncio.run(_sampled(settings, tasks, items[:_ITEMS]))
    else:
        checked = asyncio.run(_given(settings, items, settings.answers))
    sys.stdout.write("\n".join(table(checked)) + "\n")
    wrong = sum(isinstance(entry.grade, Ungraded) for entry in checked)
    if wrong:
        raise RewardWrong(f"{wrong} of {len(checked)} answers could not be graded; see the table")


async def _sampled(
    settings: EnvServerSettings, tasks: TaskSet, items: Sequence[Item]
) -> list[Checked]:
    deadline_s = min(settings.start_deadline_s, _SERVER_DEADLINE_S)
    settings = settings.model_copy(update={"start_deadline_s": deadline_s})
    template = open_template(settings, tasks)
    plan = replace(
        sampling_plan(settings, tasks), group_size=ANSWERS // len(items), drop_equal_scores=False
    )
    checked: list[Checked] = []
    async with open_engine(settings, tasks, template) as engine:
        for item in items:
            try:
                answers, _, grades = await engine.sample(item, plan)
            except GroupLost as lost:
                raise RewardWrong(f"no answers to grade: {lost.detail}") from lost
            checked += [Checked(item, str(a), g) for a, g in zip(answers, grades, strict=True)]
    return checked


async def _given(settings: EnvServerSettings, items: Sequence[Item], file: Path) -> list[Checked]:
    answers = [*_answers(file, len(items))]
    with task_code(settings) as code:
        grader = Grader(settings.reward_weights, code)
        found = [
            Checked(items[row], text, (await _graded(settings, grader, items[row], text))[0])
            for row, text in answers
        ]
        grader.check_weights()
        return found


async def _graded(
    settings: EnvServerSettings, grader: Grader, item: Item, text: str
) -> list[Grade | Ungraded]:
    messages = answered(item.messages, text)
    limit = settings.max_completion_tokens or item.task.max_completion_tokens or settings.seq_len
    answer = Answer(
        text,
        messages=messages,
        state=State(item.row, messages),
        max_tokens=limit,
        opening=divided(item.messages)[1],
    )
    return await grader.grade_all(item.task, [answer], item.row)


def _answers(file: Path, rows: int) -> list[tuple[int, str]]:
    """(row, text) of each line: a text for the first row, or `{"row": 2, "answer": "7"}`."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AnswersUnusable(f"--answers {file}: {error}") from error
    found = [_answer(line, f"{file} line {n}", rows) for n, line in enumerate(lines, start=1)]
    if not found:
        raise AnswersUnusable(f"--answers {file}: no line in it; write one answer per line")
    return found


def _answer(line: str, place: str, rows: int) -> tuple[int, str]:
    try:
        content = json.loads(line)
    except ValueError:
        return 0, line
    if not isinstance(content, dict) or "answer" not in content:
        return 0, line
    row = content.get("row", 1)
    if not isinstance(row, int) or not 1 <= row <= rows:
        raise AnswersUnusable(f"{place}: row {row!r}; the data has rows 1 to {rows}")
    return row - 1, str(content["answer"])


def table(checked: Sequence[Checked]) -> list[str]:
    """The table, grouped by prompt. What a model or a reward wrote reaches the terminal as text: a
    control character in it is shown as its escape sequence."""
    lines: list[str] = []
    shown: Item | None = None
    for entry in checked:
        if entry.item is not shown:
            shown = entry.item
            prompt = shown.messages[-1]["content"]
            lines += ["", f"prompt: {_short(prompt, _WIDTH - 8)}"]
        lines += _entry(entry)
    return [printable(line) for line in lines[1:]]


def _entry(entry: Checked) -> list[str]:
    answer = _short(entry.answer, _WIDTH - 18)
    whole = [] if answer == repr(entry.answer) else _whole(entry.answer)
    if isinstance(entry.grade, Ungraded):
        return [f"   not graded   {answer}", f"                {entry.grade.problem}", *whole]
    parts = "  ".join(f"{name} {value:g}" for name, value in entry.grade.parts.items())
    details = f"{parts}  ({entry.grade.reason})" if entry.grade.reason else parts
    return [f"  score {entry.grade.score:6.3f}  {answer}", f"                {details}", *whole]


def _whole(answer: str) -> list[str]:
    """A long answer, so that its grade can be checked."""
    return [f"                | {line}" for line in answer.splitlines()]


def _short(text: str, width: int) -> str:
    shown = repr(text)
    return shown if len(shown) <= width else shown[: width - 3] + "..."
