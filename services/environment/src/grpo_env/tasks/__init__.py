"""Tasks: where prompts come from and how answers are graded.

A new task is one module here, one line in `registry.py` and one name in `settings.TaskName`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, runtime_checkable


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Answer:
    """What the policy said. `finished` is False where the limit of tokens cut it off."""

    text: str
    finished: bool = True


class Item(Protocol):
    """One prompt and what grading it needs. Used for one group, then thrown away."""

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation that the policy continues."""

    def grade(self, answer: Answer) -> float:
        """Score one answer. Runs outside of the event loop, so it may take a while.

        A score that is not finite, or a `ValueError`, means that the answer could not be graded:
        the group is quarantined and counted. It never becomes a score of 0.
        """


class Task(Protocol):
    """An endless, seeded stream of items."""

    @property
    def name(self) -> str: ...

    @property
    def max_completion_tokens(self) -> int:
        """Room that an answer needs, where the user sets no limit (tokens)."""

    def next_item(self) -> Item: ...


@dataclass(frozen=True)
class KeptItems:
    """What is left of a data set once the items that do not fit are gone."""

    kept: int
    skipped: int


@runtime_checkable
class DatasetTask(Task, Protocol):
    """A task whose items come from a data set, some of them perhaps too long to be asked."""

    def keep(self, fits: Callable[[Item], bool]) -> KeptItems:
        """Never hand out again what does not fit."""
