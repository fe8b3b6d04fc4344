"""How old what is trained on is, across trainers that went on one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_core.wire import PolicyVersion, RolloutFacts


@dataclass(frozen=True)
class Lineage:
    """Where this trainer began.

    Args:
        first: the name of the weights it began with; later epochs are its own, too
        begun_as: another name under which the server served just these; None: there was none
    """

    first: PolicyVersion
    begun_as: PolicyVersion | None = None

    def renamed(self, facts: RolloutFacts) -> RolloutFacts:
        """With the trainer's own name where the server used the other one."""
        if self.begun_as is None:
            return facts
        versions = [
            (self._own(PolicyVersion(*first)), self._own(PolicyVersion(*last)))
            for first, last in facts.policy_version
        ]
        return facts.model_copy(update={"policy_version": versions})

    def age(self, version: PolicyVersion, step: int) -> int:
        """Updates between the weights of `version` and those after `step` steps.

        Of an earlier trainer, by way of the weights that this one began with: steps that its
        predecessor took beyond them are lost, so they count there and back.
        """
        if version.epoch >= self.first.epoch:
            return step - version.step
        return step - self.first.step + abs(version.step - self.first.step)

    def oldest(self, facts: RolloutFacts, step: int) -> int | None:
        """Age of the oldest first token of a group; None where no version is known."""
        ages = [self.age(PolicyVersion(*first), step) for first, _ in facts.policy_version]
        return max(ages, default=None)

    def _own(self, version: PolicyVersion) -> PolicyVersion:
        return self.first if version == self.begun_as else version


BEGINNING = Lineage(PolicyVersion(0, 0))


def stale_groups(
    facts: Sequence[RolloutFacts], lineage: Lineage, step: int, max_staleness: int | None
) -> set[int]:
    """Places of the groups that are older than allowed. One whose versions nobody knows is not
    known to be old."""
    if max_staleness is None:
        return set()
    ages = {place: lineage.oldest(one, step) for place, one in enumerate(facts)}
    return {place for place, age in ages.items() if age is not None and age > max_staleness}
