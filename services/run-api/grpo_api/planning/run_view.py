"""A run as planning sees it, and the answer of `/status-env`, which slows environments down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_api.planning.batch_plan import Demand, Kind, demand
from grpo_core.wire.fields import IGNORED_WEIGHT
from grpo_core.wire.run_api import EnvironmentRegistration, EnvironmentStatus, ListedServer

PRESSURE_FROM = 0.5
"""No environment is slowed down while the queue is at most this full."""
MIN_ENV_WEIGHT = 0.01
"""The smallest weight, so that every environment keeps sending some groups."""


@dataclass(frozen=True)
class QueueLimits:
    queued_groups: int
    queued_bytes: int
    """Stored bytes of queued groups and buffered parts."""

    def fill(self, groups: int, stored_bytes: int) -> float:
        """How full the queue is, by the nearer limit. From 1.0 on, submissions wait."""
        return max(groups / self.queued_groups, stored_bytes / self.queued_bytes)


@dataclass(frozen=True)
class Environment:
    """A registered environment.

    `connected`: it has not disconnected and has polled lately. A disconnected environment keeps its
    id and its groups, but has no weight and no minimum.
    """

    env_id: int
    name: str
    connected: bool
    registration: EnvironmentRegistration

    @property
    def kind(self) -> Kind:
        return Kind(self.env_id, self.registration.group_size)

    @property
    def minimum(self) -> float:
        """Its reserved fraction of every batch."""
        return self.registration.min_batch_allocation or 0.0

    @property
    def tokens_times_weight(self) -> float:
        weight = self.registration.weight
        return self.registration.max_token_length * (0.0 if weight == IGNORED_WEIGHT else weight)


@dataclass(frozen=True)
class RunView:
    """All registered environments, in that order, and the counters at the same moment."""

    environments: Sequence[Environment]
    current_step: int
    batch_size: int
    queued: Mapping[Kind, int]
    """Groups in the queue by kind, whose env_id is None for an unregistered sender. Parts that were
    queued together count as one group."""
    max_group_size: int
    """Sequences in the largest queued group; 1 if the queue is empty."""
    queued_groups: int
    stored_bytes: int
    """Of the queue and the buffers."""
    num_steps: int | None
    """The step at which the trainer has all its batches; None if unknown."""

    def connected(self) -> list[Environment]:
        return [environment for environment in self.environments if environment.connected]

    def demand(self) -> Demand:
        """The minimums of the next batch."""
        minimums = {environment.kind: environment.minimum for environment in self.connected()}
        return demand(self.batch_size, minimums, self.queued)

    def is_waited_for(self, sender: Kind) -> bool:
        """Whether the next batch may need groups of this sender: if all senders paused while the
        queue holds no batch, the run would stop forever.

            batch of 16, queued: B, B of 8; A reserves half of it     true for A alone
            batch of 16, queued: A of 8, B of 4; nothing reserved     true for both: no sum is 16

        A sender that is waited for pauses only because of its own groups (`environment_status`,
        `may_overfill`): a batch's worth from every sender makes a batch.
        """
        needed = self.demand()
        if needed.is_met_by(self.queued):
            return False
        unmet = needed.unmet(self.queued)
        with_minimums = {kind: needed.batch_size // kind.sequences for kind in unmet}
        if unmet and needed.is_met_by({**self.queued, **with_minimums}):
            return sender in unmet
        return True

    def sender(self, env_id: int | None, sequences: int) -> Kind:
        """The kind that a submitted group of this size belongs to."""
        for environment in self.connected():
            if environment.env_id == env_id:
                return environment.kind
        return Kind(None, sequences)

    def may_overfill(self, sender: Kind) -> bool:
        """Whether groups of this sender are accepted although the queue is full: the next batch may
        need them, and fewer are queued than one batch could hold. Planning reads no more."""
        has_room = self.queued.get(sender, 0) < self.batch_size // sender.sequences
        return has_room and self.is_waited_for(sender)

    def sequences_by_env(self) -> dict[int | None, int]:
        """Queued sequences by env_id."""
        sequences: dict[int | None, int] = {}
        for kind, groups in self.queued.items():
            sequences[kind.env_id] = sequences.get(kind.env_id, 0) + groups * kind.sequences
        return sequences

    def pressure(self, limits: QueueLimits) -> float:
        """Back-pressure: 0.0 up to half of the nearer limit, then rising linearly to 1.0 at it."""
        fill = limits.fill(self.queued_groups, self.stored_bytes)
        return min(1.0, max(0.0, (fill - PRESSURE_FROM) / (1.0 - PRESSURE_FROM)))


def environment_status(
    own: Environment, run: RunView, limits: QueueLimits, servers: Sequence[ListedServer] = ()
) -> EnvironmentStatus:
    """Answer of `/status-env` for `own`, which is one of `run.environments`.

    Sizes are in groups of the asking environment. Sequences of other environments beyond their
    minimum count as queued too, rounded up to whole groups of the largest size. They do not count
    if `is_waited_for` is true, because this environment must not slow down then.

    A fuller queue gives a smaller weight, and Atropos environments then send fewer requests.
    """
    minimums = {environment.env_id: environment.minimum for environment in run.connected()}
    group_size = own.registration.group_size
    own_sequences = run.sequences_by_env().get(own.env_id, 0)
    queued_sequences = own_sequences + _beyond_minimums(own.env_id, minimums, run)
    if queued_sequences >= run.batch_size and run.is_waited_for(own.kind):
        queued_sequences = own_sequences
    pressure = run.pressure(limits)
    if pressure and run.may_overfill(own.kind):
        pressure = 0.0
    return EnvironmentStatus(
        current_step=run.current_step,
        queue_size=queued_sequences // group_size,
        unallocated_fraction=1.0 - min(1.0, math.fsum(minimums.values())),
        self_queue_size=own_sequences // group_size,
        max_group_size=run.max_group_size,
        env_weight=max(MIN_ENV_WEIGHT, _weight(own, run.connected()) * (1.0 - pressure)),
        pressure=pressure,
        num_steps=run.num_steps,
        servers=tuple(servers),
    )


def _beyond_minimums(own_id: int, minimums: Mapping[int, float], run: RunView) -> int:
    """Queued sequences of other environments beyond their minimums, as Atropos' server counts them:
    in packs of `max_group_size`, and none if all groups are single sequences."""
    pack = run.max_group_size
    if pack <= 1:
        return 0
    total = 0
    for env_id, sequences in run.sequences_by_env().items():
        if env_id == own_id:
            continue
        minimum = 0.0 if env_id is None else minimums.get(env_id, 0.0)
        packed = math.ceil(sequences / pack) * pack
        total += max(0, packed - int(run.batch_size * minimum))
    return total


def _weight(own: Environment, connected: Sequence[Environment]) -> float:
    """The environment's share of the token budget of all connected environments.

    1.0 if its own weight is to be ignored; `MIN_ENV_WEIGHT` if no environment has any weight.
    """
    if own.registration.weight == IGNORED_WEIGHT:
        return 1.0
    total = math.fsum(environment.tokens_times_weight for environment in connected)
    return max(MIN_ENV_WEIGHT, own.tokens_times_weight / total) if total else MIN_ENV_WEIGHT
