"""Computes how stale a group is, also across restarts of the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup


@dataclass(frozen=True)
class GroupProvenance:
    """The policy versions that sampled a group, in this trainer's numbering.

    Args:
        facts: as the environment reports them
        bound: the newest version that may have sampled the group; None if unknown, or if `facts`
            name the exact versions
        received_under: the served version at the time when run-api received the group
    """

    facts: RolloutFacts
    bound: PolicyVersion | None
    received_under: PolicyVersion | None

    @property
    def versions(self) -> list[PolicyVersion]:
        """The version of each completion's first token, or the bound; empty if unknown."""
        versions = [first for first, _ in self.facts.policy_version]
        return versions if self.bound is None else [*versions, self.bound]


@dataclass(frozen=True)
class VersionHistory:
    """The policy versions with which this trainer started.

    Args:
        first: the version of its starting weights; all later epochs are its own too
        begun_as: another version under which the server served the same weights, if any
    """

    first: PolicyVersion
    begun_as: PolicyVersion | None = None

    def provenance(
        self, group: ScoredGroup, received_under: PolicyVersion | None
    ) -> GroupProvenance:
        """Args: received_under: the served version at the time when run-api received the group"""
        facts = RolloutFacts.of(group)
        under = None if received_under is None else self._own(received_under)
        if facts.policy_version:
            return GroupProvenance(self._renamed(facts), None, under)
        return GroupProvenance(facts, under, under)

    def age(self, version: PolicyVersion, step: int) -> int:
        """Number of updates between the weights of `version` and those after `step` steps.

        Steps that an earlier trainer took after its last checkpoint are lost. The age of such
        weights is their distance back to the checkpoint plus the distance forward from it.
        """
        if version.epoch >= self.first.epoch:
            return step - version.step
        return step - self.first.step + abs(version.step - self.first.step)

    def is_stale(self, provenance: GroupProvenance, step: int, max_staleness: int | None) -> bool:
        """Whether a completion's first token, or the bound, is older than allowed. A group without
        a known version or bound counts as fresh enough."""
        if max_staleness is None:
            return False
        return any(self.age(version, step) > max_staleness for version in provenance.versions)

    def _own(self, version: PolicyVersion) -> PolicyVersion:
        """This trainer's version of these weights, if the server used the other one."""
        return self.first if version == self.begun_as else version

    def _renamed(self, facts: RolloutFacts) -> RolloutFacts:
        if self.begun_as is None:
            return facts
        versions = [(self._own(first), self._own(last)) for first, last in facts.policy_version]
        return facts.model_copy(update={"policy_version": versions})


NO_HISTORY = VersionHistory(PolicyVersion(0, 0))
