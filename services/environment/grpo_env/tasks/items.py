"""Items: the rows of a task with their prompts, divided into training and evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import structlog

from grpo_env.tasks.data_files import DataUnusable
from grpo_env.tasks.rows import Row, each_once, no_column
from grpo_env.tasks.task import Task
from grpo_env.tasks.tool_calls import Message

log = structlog.get_logger()

Prompt = str | Sequence[Message]


def content_hash(prompt: Prompt, row: Row | None = None) -> str:
    """16 hexadecimal digits of the SHA-256 of a prompt, and of its row if it is given.

    System messages do not count, so another instruction does not make another item.
    """
    said = prompt if isinstance(prompt, str) else [m for m in prompt if m["role"] != "system"]
    content = said if row is None else [said, row]
    # ASCII: a prompt may hold half of a surrogate pair.
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_held_out(key: str, share: float) -> bool:
    """Whether an item is kept for evaluation. Each item's own hash decides, so that rows that are
    added to the data later move no other row."""
    return int(key[:8], 16) < share * 2**32


@dataclass(frozen=True)
class Item:
    """One prompt of a task. Each use of it makes one group."""

    task: Task
    row: Row
    prompt: Prompt
    hides_its_row: bool = False
    """Most prompts of the task are equal, so items differ in their rows."""
    place: str = "a row"
    """Names the row in messages: `training row 8 of my.jsonl`."""

    @cached_property
    def key(self) -> str:
        return content_hash(self.prompt, self.row if self.hides_its_row else None)

    @property
    def messages(self) -> list[Message]:
        """The prompt as messages. A text without chat template is one message of the user."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return list(self.prompt)


def all_items(task: Task) -> list[Item]:
    """Every row of the split `train`, in its order. Raises `DataUnusable`."""
    return _items(task, task.rows("train") or (), "training")


def training_items(task: Task) -> list[Item]:
    """All items of the split `train`, without those that are held out for evaluation. Raises
    `DataUnusable`: the data is invalid, or nothing is left."""
    items = all_items(task)
    if task.rows("test") is not None:
        return items
    kept = [item for item in items if not is_held_out(item.key, task.held_out)]
    if not kept:
        raise DataUnusable(
            f"task {task.name}: all {len(items)} rows are held out; use --eval-data or --held-out 0"
        )
    if len(kept) < len(items):
        log.info(
            "data.divided", task=task.name, training=len(kept), held_out=len(items) - len(kept)
        )
    return kept


def evaluation_items(task: Task) -> list[Item]:
    """Items that training never uses: the split `test` without prompts that training has too, or
    the rows of the training data that are held out.

    Raises:
        DataUnusable: the data is invalid, or no item is left.
    """
    training = all_items(task)
    rows = task.rows("test")
    if rows is None:
        found = [
            replace(item, place=item.place.replace("training", "held-out", 1))
            for item in training
            if is_held_out(item.key, task.held_out)
        ]
    else:
        hides = training[0].hides_its_row
        test = [replace(item, hides_its_row=hides) for item in _items(task, rows, "evaluation")]
        used = {item.key for item in training}
        found = [item for item in test if item.key not in used]
        if len(found) < len(test):
            log.warning(
                "evaluation.items_dropped",
                task=task.name,
                dropped=len(test) - len(found),
                reason="training uses the same prompts",
            )
    found = [*{item.key: item for item in found}.values()]  # each prompt once
    if not found:
        raise DataUnusable(
            f"task {task.name}: no item for evaluation; pass --eval-data, or raise --held-out"
        )
    return found


def _items(task: Task, rows: Iterable[Row], kind: str) -> list[Item]:
    found: list[Item] = []
    wrong: list[tuple[str, str]] = []
    options = task.options
    data = (kind == "evaluation" and options.eval_data) or options.data
    source = f" of {data}" if data else ""
    for number, row in enumerate(rows, start=1):
        try:
            prompt = task.prompt(row)
            if isinstance(prompt, str) and task.is_conversation:
                raise ValueError("a conversation needs messages as its prompt, not a text")
            found.append(Item(task, row, prompt, place=f"{kind} row {number}{source}"))
        except KeyError as error:
            wrong.append((f"row {number}", no_column("".join(map(str, error.args)), row)))
        except ValueError as error:
            wrong.append((f"row {number}", str(error)))
    if wrong:
        raise DataUnusable(
            f"task {task.name}: {len(wrong)} of {len(wrong) + len(found)} {kind} rows{source} "
            f"cannot be used:\n{each_once(wrong, options.columns)}"
        )
    if not found:
        raise DataUnusable(f"task {task.name}: the {kind} data has no rows")
    hides = 2 * len({content_hash(item.prompt) for item in found}) <= len(found)
    return [replace(item, hides_its_row=True) for item in found] if hides else found


@dataclass(frozen=True)
class Draw:
    """An item of the stream. `number`: of this draw among those of its task."""

    item: Item
    part: int
    number: int


class DrawNumbers:
    """A set of draws, as run-api keeps it for an environment. `low`: the lowest that is missing.

    Written as its ranges: `0-41,43-45`.
    """

    def __init__(self, low: int = 0) -> None:
        self.low = low
        self._above: set[int] = set()

    @classmethod
    def parse(cls, written: str) -> DrawNumbers:
        """Read ranges in ascending order. Raises `ValueError`: the text is no list of ranges."""
        found = cls()
        for first, last in (map(int, part.split("-")) for part in written.split(",")):
            if first <= found.low:
                found.low = max(found.low, last + 1)
            else:
                found._above.update(range(first, last + 1))
        return found

    @property
    def end(self) -> int:
        """One more than the largest number."""
        return max(self._above, default=self.low - 1) + 1

    def add(self, number: int) -> None:
        if number >= self.low:
            self._above.add(number)
        while self.low in self._above:
            self._above.remove(self.low)
            self.low += 1

    def missing(self) -> list[int]:
        """All numbers below `end` that are not in the set."""
        return [n for n in range(self.low, self.end) if n not in self._above]

    def written(self, *more: int) -> str:
        """With more numbers. Empty if there are none."""
        ranges = [[0, self.low - 1]] if self.low else []
        for number in sorted({*self._above, *(one for one in more if one >= self.low)}):
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        return ",".join(f"{first}-{last}" for first, last in ranges)
