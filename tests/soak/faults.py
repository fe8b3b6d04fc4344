"""Which process is hit when, and how: drawn from a seed before the soak begins. Pure."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

REDIS, TRAINER, FIRST_API, SECOND_API = "redis", "trainer", "run-api-1", "run-api-2"

ENVIRONMENTS = tuple(f"environment-{number}" for number in range(8))

_HITS = (
    ("SIGKILL run-api", (FIRST_API,), signal.SIGKILL),
    ("SIGKILL run-api", (SECOND_API,), signal.SIGKILL),
    ("SIGKILL both run-api", (FIRST_API, SECOND_API), signal.SIGKILL),
    ("SIGTERM run-api", (FIRST_API,), signal.SIGTERM),
    ("SIGTERM run-api", (SECOND_API,), signal.SIGTERM),
    ("SIGKILL Redis", (REDIS,), signal.SIGKILL),
    ("SIGKILL Redis", (REDIS,), signal.SIGKILL),
    ("SIGTERM Redis", (REDIS,), signal.SIGTERM),
    ("SIGKILL Redis and run-api", (REDIS, FIRST_API), signal.SIGKILL),
    ("SIGKILL trainer", (TRAINER,), signal.SIGKILL),
    ("SIGKILL trainer", (TRAINER,), signal.SIGKILL),
    ("SIGKILL trainer", (TRAINER,), signal.SIGKILL),
    ("SIGTERM trainer", (TRAINER,), signal.SIGTERM),
)
"""One round: each of these once, in any order, and an environment."""
ROUND = len(_HITS) + 1

_ENVIRONMENT_KILLED = "SIGKILL environment"

KINDS = (*dict.fromkeys(kind for kind, _, _ in _HITS), _ENVIRONMENT_KILLED)

_BETWEEN_S = (0.5, 3.5)
_DOWN_S = (0.0, 1.5)


@dataclass(frozen=True)
class Fault:
    """`at_s` counts from the beginning; the victims are started again `down_s` after their end."""

    at_s: float
    kind: str
    victims: tuple[str, ...]
    signal: signal.Signals
    down_s: float


def plan_faults(seed: int, seconds: float) -> list[Fault]:
    """Faults for so many seconds, in order. The same seed gives the same plan."""
    dice = random.Random(seed)
    faults: list[Fault] = []
    at_s = 0.0
    while True:
        victim = dice.choice(ENVIRONMENTS)
        hits = [*_HITS, (_ENVIRONMENT_KILLED, (victim,), signal.SIGKILL)]
        dice.shuffle(hits)
        for kind, victims, number in hits:
            at_s += dice.uniform(*_BETWEEN_S)
            if at_s > seconds:
                return faults
            faults.append(Fault(at_s, kind, victims, number, dice.uniform(*_DOWN_S)))
