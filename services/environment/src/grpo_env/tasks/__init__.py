"""Tasks: each supplies prompts and grades the answers.

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
    """The text of a completion. `finished`: False if the token limit cut it off."""

    text: str
    finished: bool = True


class Item(Protocol):
    """One prompt, and the means to grade answers to it. Each item is used for one group."""

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation that the policy continues."""

    def grade(self, answer: Answer) -> float:
        """Score one answer. This runs in a thread, so it may take seconds.

        Raise `ValueError`, or return a value that is not finite, if the answer cannot be graded.
        The group is then dropped and counted; the answer never gets a score of 0.
        """


class Task(Protocol):
    """An endless, seeded stream of items."""

    @property
    def name(self) -> str: ...

    @property
    def max_completion_tokens(self) -> int:
        """The limit of tokens per completion, if the user sets none."""

    def next_item(self) -> Item: ...


@dataclass(frozen=True)
class KeptItems:
    """The number of items that were kept and skipped when a data set was filtered."""

    kept: int
    skipped: int


@runtime_checkable
class DatasetTask(Task, Protocol):
    """A task whose items come from a data set, so that too long prompts can be removed."""

    def keep(self, fits: Callable[[Item], bool]) -> KeptItems:
        """Remove all items for which `fits` returns False."""
