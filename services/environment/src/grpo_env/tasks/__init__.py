"""Tasks: where prompts come from and how answers are graded.

A new task is one module here plus one line in `registry.py` and one name in `settings.TaskName`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypedDict


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class Item(Protocol):
    """One prompt and what grading it needs. Used for one group, then thrown away."""

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation that the policy continues."""

    def grade(self, completion: str) -> float:
        """Score one answer.

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
