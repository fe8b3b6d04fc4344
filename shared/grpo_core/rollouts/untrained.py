"""What an environment keeps of groups that never reach the trainer: `groups.json`
with counts, and a sample of their rollouts in the directories `dropped` and `evaluation`."""

from __future__ import annotations

from pydantic import BaseModel

COUNTS_FILE = "groups.json"
DROPPED, EVALUATION = "dropped", "evaluation"


class Example(BaseModel):
    """A completion of a dropped group."""

    score: float
    text: str


class GroupsFile(BaseModel):
    """The content of `groups.json`.

    `dropped` counts groups whose scores are all equal.
    """

    queued: int = 0
    """Groups in the queue, of all environments."""
    batch: int = 0
    """Groups that the trainer takes at once."""
    submitted: int = 0
    """Since the trainer took its newest batch, as `dropped`."""
    dropped: int = 0
    all_submitted: int = 0
    """Since the start of the environment, as `all_dropped`."""
    all_dropped: int = 0
    recently_dropped: float = 0.0
    """Share of the newest groups."""
    examples: list[Example] = []
