"""The hits of a soak: which process is killed how, in which state, and at which pace."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, replace
from enum import StrEnum

REDIS, TRAINER = "redis", "trainer"
APIS = ("run-api-1", "run-api-2")
ENVIRONMENTS = tuple(f"environment-{number}" for number in range(4))


class Moment(StrEnum):
    """A state of the process that is killed; `TRAINING` and `SAVED` are of the trainer."""

    ANY = "any"
    REWRITING = "rewriting"
    """Redis has just been told to rewrite its append-only file."""
    TRAINING = "training"
    """The batch is trained on and in no checkpoint."""
    SAVED = "saved"
    """The batch is in a checkpoint and not acknowledged."""


@dataclass(frozen=True)
class Hit:
    """`victims` are hit all at once, or one of them where `one_of_them` says so."""

    kind: str
    victims: tuple[str, ...]
    signal: signal.Signals = signal.SIGKILL
    moment: Moment = Moment.ANY
    one_of_them: bool = False


HITS = (
    Hit("SIGKILL run-api", APIS, one_of_them=True),
    Hit("SIGKILL both run-api", APIS),
    Hit("SIGTERM run-api", APIS, signal.SIGTERM, one_of_them=True),
    Hit("SIGKILL Redis", (REDIS,)),
    Hit("SIGKILL Redis, rewriting its file", (REDIS,), moment=Moment.REWRITING),
    Hit("SIGTERM Redis", (REDIS,), signal.SIGTERM),
    Hit("SIGKILL Redis and run-api", (REDIS, APIS[0])),
    Hit("SIGKILL trainer, batch not saved", (TRAINER,), moment=Moment.TRAINING),
    Hit("SIGKILL trainer, batch not acknowledged", (TRAINER,), moment=Moment.SAVED),
    Hit("SIGTERM trainer", (TRAINER,), signal.SIGTERM),
    Hit("SIGKILL environment", ENVIRONMENTS, one_of_them=True),
)
"""One round: each of these once, in any order."""

BATCHES_BETWEEN = (0, 0, 1, 5, 20)
"""Trained between two hits. 0: the next comes while the previous is still being recovered."""
MAX_DOWN_S = 1.0


def plan_round(dice: random.Random) -> list[Hit]:
    return [
        replace(hit, victims=(dice.choice(hit.victims),)) if hit.one_of_them else hit
        for hit in dice.sample(HITS, len(HITS))
    ]
