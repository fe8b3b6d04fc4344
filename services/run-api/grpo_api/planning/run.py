"""Records of a run's limits, environments and queue counters, as planning reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_api.planning.batch import Demand, Share, demand
from grpo_api.planning.subset_sum import Kind
from grpo_core.wire.fields import IGNORED_WEIGHT
from grpo_core.wire.run_api import EnvironmentRegistration, EnvironmentStatus

PRESSURE_FROM = 0.5
"""No environment is slowed down while the queue is at most this full."""


@dataclass(frozen=True)
class Limits:
    """
    Attributes:
        queued_groups: groups in the queue.
        queued_bytes: stored bytes of queued groups and buffered parts.
    """

    queued_groups: int
    queued_bytes: int


@dataclass(frozen=True)
class Fill:
    """How much the queue and the buffers hold."""

    groups: int
    stored_bytes: int

    def reaches(self, limits: Limits) -> bool:
        """Whether a limit is reached; submissions wait until it is not."""
        return self.groups >= limits.queued_groups or self.stored_bytes >= limits.queued_bytes

    def pressure(self, limits: Limits) -> float:
        """Back-pressure: 0.0 up to half of the nearer limit, then rising linearly to 1.0 at it."""
        fill = max(self.groups / limits.queued_groups, self.stored_bytes / limits.queued_bytes)
        return min(1.0, max(0.0, (fill - PRESSURE_FROM) / (1.0 - PRESSURE_FROM)))


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
    def share(self) -> Share:
        minimum = self.registration.min_batch_allocation or 0.0
        return Share(self.env_id, self.registration.group_size, minimum)


@dataclass(frozen=True)
class RunCounters:
    """Counters of the run and its queue.

    Attributes:
        queued: number of bundles by kind; the kind's env_id is None for an unregistered sender.
        max_group_size: sequences in the largest queued group; 1 if the queue is empty.
        num_steps: the step at which the trainer has all its batches; None if unknown.
    """

    current_step: int
    batch_size: int
    queued: Mapping[Kind, int]
    max_group_size: int
    fill: Fill
    num_steps: int | None

    def sequences_by_env(self) -> dict[int | None, int]:
        sequences: dict[int | None, int] = {}
        for kind, bundles in self.queued.items():
            sequences[kind.env_id] = sequences.get(kind.env_id, 0) + bundles * kind.sequences
        return sequences


@dataclass(frozen=True)
class RunView:
    """All registered environments, in that order, and the counters at the same moment."""

    environments: Sequence[Environment]
    counters: RunCounters

    def connected(self) -> list[Environment]:
        return [environment for environment in self.environments if environment.connected]

    def demand(self) -> Demand:
        """The minimums of the next batch."""
        shares = [environment.share for environment in self.connected()]
        return demand(self.counters.batch_size, shares, self.counters.queued)


MIN_ENV_WEIGHT = 0.01
"""The smallest weight, so that every environment keeps sending some groups."""


def environment_status(own: Environment, run: RunView, limits: Limits) -> EnvironmentStatus:
    """Answer of `/status-env` for `own`, which is one of `run.environments`.

    Sizes are in groups of the asking environment. Sequences of other environments beyond their
    minimum count as queued too, rounded up to whole groups of the largest size. They do not count
    if `is_waited_for` is true, because this environment must not slow down then.

    A fuller queue gives a smaller weight, and Atropos environments then send fewer requests.
    """
    counters, connected = run.counters, run.connected()
    minimums = {e.env_id: e.registration.min_batch_allocation or 0.0 for e in connected}
    own_sequences = counters.sequences_by_env().get(own.env_id, 0)
    queued_sequences = own_sequences + _beyond_minimums(own.env_id, minimums, counters)
    pressure = counters.fill.pressure(limits)
    if queued_sequences >= counters.batch_size and is_waited_for(own.share, run):
        queued_sequences = own_sequences
    if pressure and may_overfill(own.share, run):
        pressure = 0.0
    group_size = own.registration.group_size
    return EnvironmentStatus(
        current_step=counters.current_step,
        queue_size=queued_sequences // group_size,
        unallocated_fraction=1.0 - min(1.0, math.fsum(minimums.values())),
        self_queue_size=own_sequences // group_size,
        max_group_size=counters.max_group_size,
        env_weight=max(MIN_ENV_WEIGHT, _weight(own, connected) * (1.0 - pressure)),
        pressure=pressure,
        num_steps=counters.num_steps,
    )


def is_waited_for(sender: Share | None, run: RunView) -> bool:
    """Whether the next batch may need groups of this sender (None: a sender that never registered).

    An environment pauses when `queue_size` shows a batch or more, and submissions wait while the
    queue is full. If no exact batch can be formed from the queue and every sender pauses, the run
    would stop forever. So the senders whose minimum is missing continue. If the batch lacks
    something else, all senders continue.

    An environment's own groups still slow it down: a batch's worth from every sender makes a batch.
    """
    queued, needed = run.counters.queued, run.demand()
    if needed.is_met_by(queued):
        return False
    unmet = needed.unmet(queued)
    with_minimums = {kind: needed.batch_size // kind.sequences for kind in unmet}
    if unmet and needed.is_met_by({**queued, **with_minimums}):
        return sender is not None and sender.kind in unmet
    return True


def may_overfill(sender: Share | int, run: RunView) -> bool:
    """Whether groups of this sender are accepted although the queue is full.

    The limit is what one batch could hold of them, since planning reads no more.

    Args:
        sender: an environment's share, or the group size of a sender that never registered.
    """
    kind = Kind(None, sender) if isinstance(sender, int) else sender.kind
    queued, batch_size = run.counters.queued.get(kind, 0), run.counters.batch_size
    share = None if isinstance(sender, int) else sender
    return queued < batch_size // kind.sequences and is_waited_for(share, run)


def _beyond_minimums(own_id: int, minimums: Mapping[int, float], counters: RunCounters) -> int:
    """Queued sequences of other environments beyond their minimum allocations."""
    pack = counters.max_group_size
    if pack <= 1:
        return 0
    total = 0
    for env_id, sequences in counters.sequences_by_env().items():
        if env_id == own_id:
            continue
        minimum = 0.0 if env_id is None else minimums.get(env_id, 0.0)
        packed = math.ceil(sequences / pack) * pack
        total += max(0, packed - int(counters.batch_size * minimum))
    return total


def _weight(own: Environment, connected: Sequence[Environment]) -> float:
    """The environment's share of the token budget of all connected environments.

    1.0 if its own weight is to be ignored; `MIN_ENV_WEIGHT` if no environment has any weight.
    """
    if own.registration.weight == IGNORED_WEIGHT:
        return 1.0
    total = math.fsum(_tokens_times_weight(environment) for environment in connected)
    return max(MIN_ENV_WEIGHT, _tokens_times_weight(own) / total) if total else MIN_ENV_WEIGHT


def _tokens_times_weight(environment: Environment) -> float:
    registration = environment.registration
    weight = 0.0 if registration.weight == IGNORED_WEIGHT else registration.weight
    return registration.max_token_length * weight
