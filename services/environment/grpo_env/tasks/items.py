"""Items: the rows of a task with their prompts, divided into training and evaluation."""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import structlog

from grpo_env.tasks.curriculum import Rule
from grpo_env.tasks.data_files import DataUnusable
from grpo_env.tasks.draws import DrawNumbers
from grpo_env.tasks.rows import each_once, no_column
from grpo_env.tasks.task import Row, Task
from grpo_env.tasks.tool_calls import Message
from grpo_env.tasks.weighted_items import TaskState, WeightedItems

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
    """All items of the split `train`, without those that are held out for evaluation.

    Raises:
        DataUnusable: the data is invalid, or nothing is left.
    """
    items = all_items(task)
    if task.rows("test") is not None:
        return items
    kept = [item for item in items if not is_held_out(item.key, task.held_out)]
    if not kept:
        raise DataUnusable(
            f"task {task.name}: every row is held out for evaluation; give more rows than "
            f"{len(items)}, or pass --held-out 0 or --eval-data"
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
        found = [item for item in training if is_held_out(item.key, task.held_out)]
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
            f"task {task.name}: no item for evaluation that training does not use; pass "
            "--eval-data with other rows, or raise --held-out"
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


class ItemStream:
    """The training items of one task or of a mixture, without end.

    Every item comes from the task that is furthest behind its share, so the shares are exact at
    any time. Each task goes through all its items in a new order each time; with a rule, the rule
    gives each item of a task its chance, and nothing is the same of two passes. The same items, the
    same seed and the same scores give the same stream.

    Args:
        parts: items and weight of each task
        rule: of the curriculum

    Raises:
        CurriculumUnusable: the rule fails on a small example.
    """

    def __init__(
        self, parts: Sequence[tuple[Sequence[Item], float]], seed: int, rule: Rule | None = None
    ) -> None:
        self._parts: list[_Shuffled | WeightedItems] = [
            _Shuffled(list(items), weight, seed + number)
            if rule is None
            else WeightedItems(items, weight, seed + number, rule)
            for number, (items, weight) in enumerate(parts)
        ]

    def next(self) -> Item:
        """Raises `ValueError` if there are no items."""
        draw = self.draw()
        self.used(draw)
        return draw.item

    def draw(self) -> Draw:
        """The next item, of which `used` or `put_back` says what became of it. Raises `ValueError`
        if there are no items."""
        part = min(
            (part for part in self._parts if part.items and part.weight),
            key=lambda part: (part.given + 1) / part.weight,  # the first one of several
        )
        part.given += 1
        item, number = part.draw()
        return Draw(item, self._parts.index(part), number)

    def used(self, draw: Draw) -> None:
        """The item was sampled: its turn is over."""
        self._parts[draw.part].used.add(draw.number)

    def put_back(self, draw: Draw) -> None:
        """The item was not sampled, so it is given again, but only once: it may be the cause."""
        self._parts[draw.part].put_back(draw.number)

    def positions(self, draw: Draw) -> dict[str, str]:
        """The numbers of the draws that are used with this one, by task, seed and mark of the
        items, as `DrawNumbers`."""
        used = [part.used for part in self._parts]
        used[draw.part] = used[draw.part].with_number(draw.number)
        return {
            self._order_of(part) + part.mark: numbers.written()
            for part, numbers in zip(self._parts, used, strict=True)
            if numbers.end
        }

    def go_on(self, positions: Mapping[str, str], step: int) -> None:
        """Go on behind the items that earlier processes used. Reads all items.

        Args:
            positions: as those of the earlier processes
            step: training step now
        """
        for part in self._parts:
            task, data, order = part.task.name, part.task.options.data, self._order_of(part)
            if used := positions.get(order + part.mark):
                part.go_on(DrawNumbers.parse(used))
                log.info("items.continued", task=task, used=part.used.end)
                continue
            if step:
                changed = any(name.startswith(order) for name in positions)
                reason = (
                    f"{data or 'the rows'} or --curriculum changed"
                    if changed
                    else "run-api knows no items of this task and --seed that were used"
                )
                hint = "items that earlier steps trained on may come again"
                log.warning("items.begun_again", task=task, step=step, reason=reason, hint=hint)

    def _order_of(self, part: _Shuffled | WeightedItems) -> str:
        return f"{part.task.name} {part.seed} "

    def __len__(self) -> int:
        """Number of items in one pass."""
        return sum(len(part.items) for part in self._parts)

    def keep(self, fits: Callable[[Item], bool]) -> list[str]:
        """Remove all items for which `fits` returns False, also from the current pass. Returns the
        names of tasks without any item left."""
        for part in self._parts:
            part.keep(fits)
        return [part.task.name for part in self._parts if not part.items]

    def graded(self, item: Item, scores: Sequence[float], step: int) -> None:
        """Note the scores of a group. Args: step: training step in which it was sampled"""
        for name, part in self._weighted():
            if name == item.task.name:
                part.graded(item, scores, step)

    def lost(self, item: Item) -> None:
        """Note a group that could not be graded."""
        for name, part in self._weighted():
            if name == item.task.name:
                part.lost(item)

    def pools(self) -> Mapping[str, Mapping[str, int]]:
        """Number of items by task and pool. Empty without a rule, as the two below."""
        return {name: part.pools() for name, part in self._weighted()}

    def state(self) -> Mapping[str, TaskState]:
        return {name: part.state() for name, part in self._weighted()}

    def restore(self, states: Mapping[str, TaskState]) -> None:
        """Go on from a saved state. Tasks that it lacks begin anew."""
        for name, part in self._weighted():
            if name in states:
                part.restore(states[name])

    def _weighted(self) -> Iterator[tuple[str, WeightedItems]]:
        """By the name of the task."""
        return (
            (part.task.name, part)
            for part in self._parts
            if isinstance(part, WeightedItems) and part.items
        )


class _Shuffled:
    """`items` in a new order in each pass; `given`: how many of them were given. The numbers of the
    draws count all items of each pass, also those that `keep` removed."""

    def __init__(self, items: list[Item], weight: float, seed: int) -> None:
        self.items, self.weight, self.given = items, weight, 0
        self.used = DrawNumbers()
        self._all, self._fits = items, [True] * len(items)
        self.seed, self._random = seed, random.Random(seed)
        self._orders: list[list[int] | None] = []  # of each pass; None: all of it is used
        self._again: deque[int] = deque()
        self._failed: set[int] = set()
        self._next = 0

    @property
    def task(self) -> Task:
        return self._all[0].task

    @cached_property
    def mark(self) -> str:
        """16 hexadecimal digits of the SHA-256 of all rows."""
        digest = hashlib.sha256()
        for item in self._all:
            digest.update(json.dumps(item.row, skipkeys=True, default=_content_of).encode())
        return digest.hexdigest()[:16]

    def draw(self) -> tuple[Item, int]:
        while True:
            number = self._again.popleft() if self._again else self._next
            self._next = max(self._next, number + 1)
            place = self._order(number // len(self._all))[-1 - number % len(self._all)]
            if self._fits[place]:
                return self._all[place], number
            self.used.add(number)

    def _order(self, of_pass: int) -> list[int]:
        while len(self._orders) <= of_pass:
            places = range(len(self._all))
            self._orders.append(self._random.sample(places, len(places)))
            ended = min(self.used.low // len(self._all), len(self._orders))
            self._orders[:ended] = [None] * ended
        order = self._orders[of_pass]
        assert order is not None
        return order

    def put_back(self, number: int) -> None:
        if number in self._failed:
            self.used.add(number)
            return
        self._failed.add(number)
        self._again.append(number)

    def go_on(self, used: DrawNumbers) -> None:
        self.used, self._next = used, used.end
        self._again.extend(used.missing())
        self._order(used.end // len(self._all))  # sampled here, not while servers wait

    def keep(self, fits: Callable[[Item], bool]) -> None:
        self._fits = [
            known and fits(item) for known, item in zip(self._fits, self._all, strict=True)
        ]
        self.items = [item for item, known in zip(self._all, self._fits, strict=True) if known]


def _content_of(value: object) -> object:
    # the text of an object, such as an image, may name its address
    return dict(value) if isinstance(value, Mapping) else type(value).__name__
