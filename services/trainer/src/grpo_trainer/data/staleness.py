"""How old what is trained on is, across trainers that went on one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from grpo_core.wire import PolicyVersion, RolloutFacts, ScoredGroup


@dataclass(frozen=True)
class Lineage:
    """Where this trainer began.

    Args:
        first: the name of the weights it began with; later epochs are its own, too
        begun_as: another name under which the server served just these; None: there was none
    """

    first: PolicyVersion
    begun_as: PolicyVersion | None = None

    def own(self, version: PolicyVersion) -> PolicyVersion:
        """The trainer's name of these weights where the server used the other one."""
        return self.first if version == self.begun_as else version

    def renamed(self, facts: RolloutFacts) -> RolloutFacts:
        """`own` for every version of a group."""
        if self.begun_as is None:
            return facts
        versions = [(self.own(first), self.own(last)) for first, last in facts.policy_version]
        return facts.model_copy(update={"policy_version": versions})

    def age(self, version: PolicyVersion, step: int) -> int:
        """Updates between the weights of `version` and those after `step` steps.

        Of an earlier trainer, by way of the weights that this one began with: steps that its
        predecessor took beyond them are lost, so they count there and back.
        """
        if version.epoch >= self.first.epoch:
            return step - version.step
        return step - self.first.step + abs(version.step - self.first.step)

    def oldest(self, making: Making, step: int) -> int | None:
        """Age of the oldest first token of a group, or of the version that bounds it; None where
        neither is known."""
        versions = [first for first, _ in making.facts.policy_version]
        if making.bound is not None:
            versions.append(making.bound)
        return max((self.age(version, step) for version in versions), default=None)


BEGINNING = Lineage(PolicyVersion(0, 0))


@dataclass(frozen=True)
class Making:
    """What is known of a group's making.

    Args:
        facts: as its environment tells them
        bound: where it names no version: no newer weights than these sampled the group, older ones
            may have. None: nobody knows, or the version itself is known
    """

    facts: RolloutFacts
    bound: PolicyVersion | None

    @classmethod
    def of(cls, group: ScoredGroup, received_under: PolicyVersion | None) -> Self:
        """Args: received_under: the version that was served when run-api received it"""
        facts = RolloutFacts.of(group)
        return cls(facts, None if facts.policy_version else received_under)


def stale_groups(
    makings: Sequence[Making], lineage: Lineage, step: int, max_staleness: int | None
) -> set[int]:
    """Places of the groups that are older than allowed. One of which nobody knows a version, nor a
    bound, is not known to be old."""
    if max_staleness is None:
        return set()
    ages = {place: lineage.oldest(one, step) for place, one in enumerate(makings)}
    return {place for place, age in ages.items() if age is not None and age > max_staleness}
