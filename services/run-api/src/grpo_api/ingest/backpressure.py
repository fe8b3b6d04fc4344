"""How much a run may hold, and how environments are slowed before it is reached. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PRESSURE_FROM = 0.5
"""Up to this fill the queue is a buffer that does its work, and nobody is slowed."""


@dataclass(frozen=True)
class Limits:
    """
    Attributes:
        queued_groups: in the queue.
        queued_bytes: as stored, of groups in the queue and of buffered parts.
        leased_bytes: as stored, of batches that were handed out and are not acknowledged.
    """

    queued_groups: int
    queued_bytes: int
    leased_bytes: int


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
