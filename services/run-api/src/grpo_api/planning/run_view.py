"""The run as planning sees it: limits, environments and the queue in numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_api.planning.quotas import Demand, Share, demand
from grpo_api.planning.subset_sum import Kind
from grpo_core.wire.run_api import EnvironmentRegistration

PRESSURE_FROM = 0.5
"""Up to this fill the queue is a buffer that does its work, and nobody is slowed."""


@dataclass(frozen=True)
class Limits:
    """
    Attributes:
        queued_groups: in the queue.
        queued_bytes: as stored, of groups in the queue and of buffered parts.
    """

    queued_groups: int
    queued_bytes: int


@dataclass(frozen=True)
class Fill:
    """What the queue and the buffers hold."""

    groups: int
    stored_bytes: int

    def reaches(self, limits: Limits) -> bool:
        """Whether submissions wait."""
        return self.groups >= limits.queued_groups or self.stored_bytes >= limits.queued_bytes

    def pressure(self, limits: Limits) -> float:
        """0.0 up to half of the nearer limit, from there straight to 1.0 at the limit."""
        fill = max(self.groups / limits.queued_groups, self.stored_bytes / limits.queued_bytes)
        return min(1.0, max(0.0, (fill - PRESSURE_FROM) / (1.0 - PRESSURE_FROM)))


@dataclass(frozen=True)
class Environment:
    """A registered environment. `connected`: it has not left, and has polled lately; one that is
    not keeps its id and its data, but neither weight nor minimum."""

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
    """The queue in numbers.

    Attributes:
        queued: bundles by sender and size; the sender is None for data without an env_id.
        max_group_size: sequences in the largest queued group, 1 where the queue is empty.
        num_steps: the step at which the trainer has all its batches; None: it does not say.
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
    """Everyone who registered, in that order, and the counters of the same moment."""

    environments: Sequence[Environment]
    counters: RunCounters

    def connected(self) -> list[Environment]:
        return [environment for environment in self.environments if environment.connected]

    def demand(self) -> Demand:
        """What the next batch has to hold."""
        shares = [environment.share for environment in self.connected()]
        return demand(self.counters.batch_size, shares, self.counters.queued)
