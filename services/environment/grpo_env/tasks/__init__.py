"""Tasks: each supplies prompts and rewards the answers.

A task of your own is a function in a file (`def reward(answer, row)`) or a subclass of `Task`;
docs/how-to/own-reward.md shows both. These are the names that it needs.
"""

from grpo_env.tasks.task import (
    Answer,
    ContextFull,
    Dialogue,
    Graded,
    Message,
    Reward,
    Row,
    Split,
    State,
    Task,
    TaskOptions,
)

__all__ = [
    "Answer",
    "ContextFull",
    "Dialogue",
    "Graded",
    "Message",
    "Reward",
    "Row",
    "Split",
    "State",
    "Task",
    "TaskOptions",
]
