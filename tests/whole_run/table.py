"""The faults of the processes of a run: which one, at which stage of a step, in which mode.

After each, the run must go on, and `verdict` must find nothing. `make faults` injects `KILLS`, of
which `make test` takes those that are `always` injected; the matrix lists all of them, and stops
`STANDS_STILL`. `make chaos` hits any of `victims` at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.whole_run.commands import (
    COLLECTIVE,
    ENGINE,
    ENVIRONMENT,
    FILES,
    NODE,
    OTHER_MODES,
    RANK,
    REDIS,
    REWARD_WORKER,
    RUN_API,
    SERVER,
    SHARED,
    SUPERVISOR,
    TRAINER,
    WORKER,
    Shape,
    server_names,
    trainer_names,
)
from tests.whole_run.stages import (
    HALF_SAVED,
    HALF_WRITTEN,
    PART_WRITTEN,
    SAVED,
    SAVING_STAGES,
    SENDING,
    STAGES,
    TRAINING,
    WAITING,
    WHEN,
)

OF_RANKS, OF_NODES = "none-2-ranks", "none-2-nodes"
_SEVERAL = Shape("none", ranks=2, fsdp=True, transport=COLLECTIVE)
SEVERAL = {OF_RANKS: _SEVERAL, OF_NODES: replace(_SEVERAL, nodes=2)}


@dataclass(frozen=True)
class Kill:
    """`victims` are killed with SIGKILL while the trainer is at the stage.

    Args: shape: a weight-sync mode, or a name in `SEVERAL`
    """

    victims: tuple[str, ...]
    stage: str
    shape: str = SHARED
    always: bool = False

    @property
    def case(self) -> str:
        """Its parameter of `test_the_run_goes_on_after_a_kill`."""
        return f"{self.shape}-{'+'.join(self.victims)}-{self.stage}"

    def __str__(self) -> str:
        where = [WHEN[self.stage]] * (self.shape not in OTHER_MODES)
        where += [f"`{self.shape}`"] * (self.shape != SHARED)
        return f"{' and '.join(self.victims)} killed, {', '.join(where)}"


def _kills() -> Iterator[Kill]:
    for stage in (TRAINING, SAVED):
        yield Kill((REDIS, RUN_API), stage, always=stage == SAVED)
    for name, stages in (
        *((name, STAGES) for name in (RUN_API, REDIS, SERVER)),
        (TRAINER, [*STAGES, *SAVING_STAGES]),
        (ENGINE, [TRAINING]),
        (ENVIRONMENT, [WAITING]),
    ):
        for stage in stages:
            yield Kill((name,), stage, always=(name, stage) == (SERVER, HALF_WRITTEN))
    for mode in OTHER_MODES:
        yield Kill((ENGINE,), WAITING, mode)
        for name in (SUPERVISOR, REDIS, TRAINER):
            yield Kill((name,), TRAINING, mode)
    moments = (TRAINING, PART_WRITTEN, SENDING)
    of_ranks = (f"{RANK}-0", f"{RANK}-1", TRAINER)
    for name, stages in (
        *((name, (*moments, HALF_SAVED)) for name in of_ranks),
        *((name, moments) for name in (SUPERVISOR, WORKER)),
    ):
        for stage in stages:
            yield Kill((name,), stage, OF_RANKS)
    for name in (f"{NODE}-0", f"{NODE}-1"):
        for stage in moments:
            yield Kill((name,), stage, OF_NODES)


KILLS = tuple(_kills())
STANDS_STILL = (REDIS, RUN_API, SERVER, ENGINE, TRAINER, ENVIRONMENT)


def victims(shape: Shape) -> list[str]:
    """What may be killed or stopped at any moment of a run, in the order in which several are
    killed: a server can tell its engine only while it lives, and a trainer its ranks."""
    servers = server_names(shape.servers)
    ranks = [f"{RANK}-{index}" for index in range(shape.ranks)] * (shape.ranks > 1)
    ranks += [WORKER] * (shape.transport != FILES)
    nodes = [f"{NODE}-{index}" for index in range(shape.nodes)] * (shape.nodes > 1)
    engines = [server.replace(SERVER, ENGINE) for server in servers]
    others = [name for name in STANDS_STILL if name not in (SERVER, ENGINE)]
    others += [*trainer_names(shape.nodes)[1:], *[REWARD_WORKER] * shape.as_shipped]
    return [*ranks, *engines, *servers, *others, *nodes]
