"""Plans the hits of a soak: which process is killed, with which signal and in which state."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, replace
from enum import StrEnum

REDIS, TRAINER = "redis", "trainer"
APIS = ("run-api-1", "run-api-2")
ENVIRONMENTS = tuple(f"environment-{number}" for number in range(4))


class Moment(StrEnum):
    """State of a process when it is killed. Only the trainer has `TRAINING` and `SAVED`."""

    ANY = "any"
    REWRITING = "rewriting"
    """Redis is rewriting its append-only file."""
    TRAINING = "training"
    """The trainer has trained on a batch that no checkpoint includes yet."""
    SAVED = "saved"
    """A checkpoint includes the batch, but it is not acknowledged yet."""


@dataclass(frozen=True)
class Hit:
    """One hit. It kills all `victims` at once, or one of them if `one_of_them`."""

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
"""One round consists of each of these hits once, in random order."""

BATCHES_BETWEEN = (0, 0, 1, 5, 20)
"""Batches trained between two hits. With 0 the next hit comes during the recovery."""
MAX_DOWN_S = 1.0


def plan_round(dice: random.Random) -> list[Hit]:
    return [
        replace(hit, victims=(dice.choice(hit.victims),)) if hit.one_of_them else hit
        for hit in dice.sample(HITS, len(HITS))
    ]
