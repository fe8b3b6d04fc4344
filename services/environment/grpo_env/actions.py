"""Actions of `env-server` that need no trainer: `process` samples groups to a file, and `check`
grades a few answers and prints a table.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import structlog

from grpo_core.errors import GrpoError
from grpo_core.rollouts.page.write import write_page
from grpo_core.rollouts.record import RolloutRecord, printable, records_of_group
from grpo_env.assembly import TaskSet, open_engine, open_template, sampling_plan, task_code
from grpo_env.rollout.chat_template import ChatTemplate, answered, divided
from grpo_env.rollout.engine import all_or_none
from grpo_env.rollout.grader import Grade, Grader, Ungraded
from grpo_env.rollout.groups import GroupLost
from grpo_env.settings import EnvServerSettings
from grpo_env.tasks import Answer, State
from grpo_env.tasks.items import Item, all_items

log = structlog.get_logger()

DEFAULT_GROUPS = 16
ANSWERS = 8
_ITEMS = 2
_SERVER_DEADLINE_S = 5.0
_WIDTH = 80


class NothingProcessed(GrpoError):
    """No group could be sampled and graded."""


async def process(settings: EnvServerSettings, tasks: TaskSet, template: ChatTemplate) -> None:
    """Write `--steps` groups to `--output`, one JSON object per line, and a page beside it.

    Groups of equal scores are written too, because they show why nothing would be learned.

    Raises:
        GrpoError: a server does not answer, or no group could be graded.
    """
    groups = settings.steps if settings.steps > 0 else DEFAULT_GROUPS
    stream = tasks.training_stream(settings.seed)
    records: list[RolloutRecord] = []
    lost: Counter[str] = Counter()
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    with settings.output.open("w", encoding="utf-8") as file:
        async with open_engine(settings, tasks, template) as (engine, _):
            plan = sampling_plan(settings, tasks)
            places = asyncio.Semaphore(settings.max_concurrent_groups)

            async def add(item: Item) -> None:
                async with places:
                    sampled = await engine.roll_out(item, plan)
                if sampled.group is None:
                    assert sampled.lost is not None
                    reason = sampled.lost.reason.value
                    lost[reason] += 1
                    log.warning("group.lost", reason=reason, detail=sampled.lost.detail)
                    return
                file.write(sampled.group.model_dump_json(exclude_none=True) + "\n")
                number = len({record.group for record in records})
                records.extend(records_of_group(1, number, sampled.group.without_padding()))

            await all_or_none(add(stream.next()) for _ in range(groups))
    if not records:
        raise NothingProcessed(
            f"none of {groups} groups could be used ({_counted(lost)}); the log names the reasons"
        )
    page = settings.output.with_suffix(".html")
    facts = {"task": settings.display_name, "model": settings.model or ""}
    write_page(page, f"Rollouts of {settings.display_name}", records, {}, template.pieces, facts)
    _print_summary(records, lost, settings.output, page)


def _print_summary(
    records: list[RolloutRecord], lost: Counter[str], output: Path, page: Path
) -> None:
    scores = [record.score for record in records]
    groups: dict[int, set[float]] = {}
    for record in records:
        groups.setdefault(record.group, set()).add(record.score)
    equal = sum(len(found) == 1 for found in groups.values())
    lines = [
        f"{len(groups)} groups, mean score {fmean(scores):.3f}, "
        f"{equal} of them with equal scores (training drops these)",
        *([f"lost: {_counted(lost)}"] if lost else []),
        f"groups: {output}",
        f"page:   {page}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _counted(lost: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(lost.items()))


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
    scores = {entry.grade.score for entry in checked if isinstance(entry.grade, Grade)}
    if len(checked) > 1 and len(scores) == 1:
        advice = (
            "use easier prompts or a stronger model, or check the reward with --answers"
            if settings.answers is None
            else f"put a right and a wrong answer into {settings.answers}, or correct the reward"
        )
        sys.stdout.write(
            f"\nall {len(checked)} answers have the score {scores.pop():g}, and training learns "
            f"nothing from equal scores: {advice}\n"
        )


async def _sampled(
    settings: EnvServerSettings, tasks: TaskSet, items: Sequence[Item]
) -> list[Checked]:
    deadline_s = min(settings.start_deadline_s, _SERVER_DEADLINE_S)
    settings = settings.model_copy(update={"start_deadline_s": deadline_s})
    template = open_template(settings, tasks)
    plan = replace(
        sampling_plan(settings, tasks, step=0),
        group_size=ANSWERS // len(items),
        drop_equal_scores=False,
    )
    checked: list[Checked] = []
    async with open_engine(settings, tasks, template) as (engine, _):
        for item in items:
            try:
                dialogues, grades = await engine.sample(item, plan)
            except GroupLost as lost:
                raise RewardWrong(f"no answers to grade: {lost.detail}") from lost
            checked += [
                Checked(item, str(dialogue.last_answer), grade)
                for dialogue, grade in zip(dialogues, grades, strict=True)
            ]
    return checked


async def _given(settings: EnvServerSettings, items: Sequence[Item], file: Path) -> list[Checked]:
    checked = []
    with task_code(settings) as code:
        grader = Grader(settings.reward_weights, code)
        for row, text in _answers(file, len(items)):
            item = items[row]
            task, messages = item.task, answered(item.messages, text)
            answer = Answer(
                text,
                messages=messages,
                state=State(item.row, messages),
                max_tokens=settings.max_completion_tokens
                or task.max_completion_tokens
                or settings.seq_len,
                opening=divided(item.messages)[1],
            )
            [grade] = await grader.grade_all(item, [answer])
            checked.append(Checked(item, text, grade))
        grader.check_weights()
    return checked


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
    except (ValueError, RecursionError):
        return 0, line
    if not isinstance(content, dict) or not content.keys() & {"row", "answer"}:
        return 0, line
    if "answer" not in content:
        raise AnswersUnusable(f"{place} has no key answer; it has {', '.join(content)}")
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
            prompt = repr(shown.messages[-1]["content"])
            most = _WIDTH - len("prompt: ")
            short = prompt if len(prompt) <= most else prompt[: most - 3] + "..."
            lines += ["", f"prompt: {short}"]
        lines += _entry(entry)
    return [printable(line) for line in lines[1:]]


def _entry(entry: Checked) -> list[str]:
    answer = repr(entry.answer)
    whole = []
    if len(answer) > _WIDTH - 18:  # below the grade, to be compared with it
        whole = [f"                | {line}" for line in entry.answer.splitlines()]
        answer = ""
    if isinstance(entry.grade, Ungraded):
        head, details = "   not graded ", entry.grade.problem
        if details.startswith(KeyError.__name__):
            details += f"; the row has {', '.join(entry.item.row)}"
    else:
        head = f"  score {entry.grade.score:6.3f}"
        details = "  ".join(f"{name} {value:g}" for name, value in entry.grade.parts.items())
        details += f"  ({entry.grade.reason})" if entry.grade.reason else ""
    return [f"{head}  {answer}".rstrip(), f"                {details}", *whole]
