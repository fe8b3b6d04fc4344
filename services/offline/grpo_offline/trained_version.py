"""The version of the trainer's weights, with which rollouts and evaluations are compared."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.data.batches import Position


@dataclass
class TrainedVersion:
    """`begun_as`: another name of the weights at the start of the run, if the server has one."""

    position: Position
    begun_as: PolicyVersion | None

    def __call__(self) -> PolicyVersion:
        return PolicyVersion(self.position.epoch, self.position.step)

    @property
    def accepted(self) -> set[PolicyVersion]:
        return {self()} | ({self.begun_as} if self.begun_as else set())

    def trained(self, position: Position) -> None:
        """The weights are new ones now."""
        self.position, self.begun_as = position, None
