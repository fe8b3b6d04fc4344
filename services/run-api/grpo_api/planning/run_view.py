"""Records of a run's limits, environments and queue counters, as planning reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_api.planning.quotas import Demand, Share, demand
from grpo_api.planning.subset_sum import Kind
from grpo_core.wire.run_api import EnvironmentRegistration

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
