"""How old the weights are that sampled a group, across the trainers of one run."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup


@dataclass(frozen=True)
class GroupProvenance:
    """Which weights sampled a group, under this trainer's names of versions.

    Args:
        facts: as its environment tells them
        bound: if it names no version: no newer weights than these sampled the group, older ones
            may have. None: nobody knows, or the version itself is known
    """

    facts: RolloutFacts
    bound: PolicyVersion | None

    @property
    def versions(self) -> list[PolicyVersion]:
        """Of each completion's first token, or the one that bounds them; empty if unknown."""
        versions = [first for first, _ in self.facts.policy_version]
        return versions if self.bound is None else [*versions, self.bound]


@dataclass(frozen=True)
class VersionHistory:
    """Where this trainer began.

    Args:
        first: the name of the weights it began with; later epochs are its own, too
        begun_as: another name under which the server served just these; None: there was none
    """

    first: PolicyVersion
    begun_as: PolicyVersion | None = None

    def provenance(
        self, group: ScoredGroup, received_under: PolicyVersion | None
    ) -> GroupProvenance:
        """Args: received_under: the version that was served when run-api received the group"""
        facts = RolloutFacts.of(group)
        if facts.policy_version:
            return GroupProvenance(self._renamed(facts), None)
        return GroupProvenance(facts, None if received_under is None else self._own(received_under))

    def age(self, version: PolicyVersion, step: int) -> int:
        """Updates between the weights of `version` and those after `step` steps.

        Of an earlier trainer, by way of the weights that this one began with: steps that its
        predecessor took beyond them are lost, so they count there and back.
        """
        if version.epoch >= self.first.epoch:
            return step - version.step
        return step - self.first.step + abs(version.step - self.first.step)

    def is_stale(self, provenance: GroupProvenance, step: int, max_staleness: int | None) -> bool:
        """Whether a completion's first token, or the bound, is older than allowed. A group of which
        nobody knows a version, nor a bound, is not known to be old."""
        if max_staleness is None:
            return False
        return any(self.age(version, step) > max_staleness for version in provenance.versions)

    def _own(self, version: PolicyVersion) -> PolicyVersion:
        """This trainer's name of these weights if the server used the other one."""
        return self.first if version == self.begun_as else version

    def _renamed(self, facts: RolloutFacts) -> RolloutFacts:
        if self.begun_as is None:
            return facts
        versions = [(self._own(first), self._own(last)) for first, last in facts.policy_version]
        return facts.model_copy(update={"policy_version": versions})


NO_HISTORY = VersionHistory(PolicyVersion(0, 0))
