"""The faults of the processes of a run: which one, at which stage of a step, in which mode.

After each, the run must go on, and `verdict` must find nothing. `make faults` injects `KILLS`, of
which `make test` takes those that are `always` injected; the matrix lists all of them, and stops
`STANDS_STILL`. `make chaos` hits any of `victims` at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.whole_run.commands import (
    ENGINE,
    ENVIRONMENT,
    OTHER_MODES,
    RANK,
    REDIS,
    REWARD_WORKER,
    RUN_API,
    SERVER,
    SHARED,
    SUPERVISOR,
    TRAINER,
    Shape,
    server_names,
)
from tests.whole_run.stages import (
    HALF_WRITTEN,
    SAVED,
    SAVING_STAGES,
    STAGES,
    TRAINING,
    WAITING,
    WHEN,
)


@dataclass(frozen=True)
class Kill:
    """`victims` are killed with SIGKILL while the trainer is at the stage."""

    victims: tuple[str, ...]
    stage: str
    mode: str = SHARED
    always: bool = False

    @property
    def case(self) -> str:
        """Its parameter of `test_the_run_goes_on_after_a_kill`."""
        return f"{self.mode}-{'+'.join(self.victims)}-{self.stage}"

    def __str__(self) -> str:
        where = WHEN[self.stage] if self.mode == SHARED else f"`{self.mode}`"
        return f"{' and '.join(self.victims)} killed, {where}"


def _kills() -> Iterator[Kill]:
    always = {(SERVER, HALF_WRITTEN), (ENGINE, TRAINING), (TRAINER, SAVED)}
    for stage in (TRAINING, SAVED):
        yield Kill((REDIS, RUN_API), stage, always=True)
    for name, stages in (
        *((name, STAGES) for name in (RUN_API, REDIS, SERVER)),
        (TRAINER, [*STAGES, *SAVING_STAGES]),
        (ENGINE, [TRAINING]),
        (ENVIRONMENT, [WAITING]),
    ):
        for stage in stages:
            yield Kill((name,), stage, always=(name, stage) in always)
    for mode in OTHER_MODES:
        yield Kill((ENGINE,), WAITING, mode)
        for name in (SUPERVISOR, REDIS, TRAINER):
            yield Kill((name,), TRAINING, mode)


KILLS = tuple(_kills())
STANDS_STILL = (REDIS, RUN_API, SERVER, ENGINE, TRAINER, ENVIRONMENT)


def victims(shape: Shape) -> list[str]:
    """What may be killed or stopped at any moment of a run, in the order in which several are
    killed: a server can tell its engine only while it lives."""
    servers = server_names(shape.servers)
    engines = [server.replace(SERVER, ENGINE) for server in servers]
    others = [name for name in STANDS_STILL if name not in (SERVER, ENGINE)]
    parts = [REWARD_WORKER] * shape.as_shipped + [RANK] * (shape.ranks > 1)
    return [*engines, *servers, *others, *parts]
