"""Filters a batch: counts repeated groups and drops stale and unusable ones.

A single bad group is counted, and training continues with the rest. Many bad groups mean a broken
environment: the run ends with an error that names the reason.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import structlog

from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup
from grpo_trainer.data.groups import GroupLimits, UsableGroup, usable_group
from grpo_trainer.errors import DuplicatedBatch, UnusableGroup

log = structlog.get_logger()

WINDOW_BATCHES = 5
"""Number of recent batches of which at most half of the groups may be unusable."""
MAX_UNUSABLE_BATCHES = 3
"""The run ends after this many batches in a row without a usable group."""
REPEAT_EVERY_STEPS = 50
"""Minimum number of steps between two warnings about repeated groups; the metric counts
them all."""
REMEMBERED_BATCHES = 300
_DIGEST_BYTES = 16


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


@dataclass(frozen=True)
class FilteredBatch:
    """The usable groups of a batch, and the counts of the others.

    `groups` is empty if all groups are stale or unusable.
    """

    groups: list[UsableGroup]
    unusable_groups: int
    repeated_groups: int
    stale_groups: int = 0


@dataclass(frozen=True)
class CheckedGroup:
    """What a group's contents alone say of it."""

    group: ScoredGroup
    digest: bytes
    provenance: GroupProvenance
    result: UsableGroup | UnusableGroup


@dataclass(frozen=True)
class _Tally:
    unusable: int
    groups: int


@dataclass(eq=False)
class GroupFilter:
    """Filters batches. Remembers recent batches and the warnings that were logged.

    Args:
        limits: the policy's vocabulary size and sequence length
        history: computes how stale groups are
        max_staleness: older groups are dropped; in steps, None for no limit
    """

    limits: GroupLimits
    history: VersionHistory = NO_HISTORY
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        self._batches = RecentBatches()
        self._tallies: deque[_Tally] = deque(maxlen=WINDOW_BATCHES)
        self._logged: set[tuple[str, int | None]] = set()
        self._next_repeat_warning = 0

    def check(
        self, groups: Sequence[ScoredGroup], received_under: Sequence[PolicyVersion | None] = ()
    ) -> list[CheckedGroup]:
        """Check each group. Changes nothing, so a thread can do it ahead of `filter`.

        Args:
            groups: one batch, not empty
            received_under: for each group the served version at the time when run-api received it;
                empty if unknown
        """
        versions = received_under or [None] * len(groups)
        pairs = enumerate(zip(groups, versions, strict=True))
        return [self._checked(index, group, version) for index, (group, version) in pairs]

    def filter(self, checked: Sequence[CheckedGroup], step: int) -> FilteredBatch:
        """Args: checked: one batch, as `check` returns it

        Raises:
            DuplicatedBatch: run-api delivered this batch before.
            UnusableGroup: no group of three batches in a row, or less than half of the groups of
                the last 5 batches, can be trained on.
        """
        repeated = self._batches.count_repeats([one.digest for one in checked], step)
        if repeated and step >= self._next_repeat_warning:
            log.warning(
                "trained_groups.received_again",
                groups=repeated,
                batch_groups=len(checked),
                step=step,
            )
            self._next_repeat_warning = step + REPEAT_EVERY_STEPS
        young = [
            one
            for one in checked
            if not self.history.is_stale(one.provenance, step, self.max_staleness)
        ]
        usable, problems = self._split(young)
        self._tallies.append(_Tally(len(problems), len(young)))
        if problems:
            self._raise_if_systematic(problems)
        return FilteredBatch(usable, len(problems), repeated, len(checked) - len(young))

    def _checked(
        self, index: int, group: ScoredGroup, received_under: PolicyVersion | None
    ) -> CheckedGroup:
        provenance = self.history.provenance(group, received_under)
        result: UsableGroup | UnusableGroup
        try:
            found = usable_group(index, group, self.limits)
            result = replace(
                found,
                facts=provenance.facts,
                version_bound=provenance.bound,
                received_under=provenance.received_under,
            )
        except UnusableGroup as problem:
            result = problem
        return CheckedGroup(group, digest(group), provenance, result)

    def _split(
        self, checked: Sequence[CheckedGroup]
    ) -> tuple[list[UsableGroup], list[UnusableGroup]]:
        usable, problems = [], []
        for group, result in ((one.group, one.result) for one in checked):
            if isinstance(result, UsableGroup):
                usable.append(result)
            else:
                problems.append(result)
                if self._is_first(result.reason, group.env_id):
                    log.warning(
                        "group.dropped",
                        reason=str(result.reason),
                        env_id=group.env_id,
                        problem=str(result),
                    )
            if group.advantages and self._is_first("advantages", group.env_id):
                log.info(
                    "advantages.received",
                    env_id=group.env_id,
                    reason="the environment sends advantages, so the trainer computes none from "
                    "its scores",
                )
        return usable, problems

    def _is_first(self, reason: str, env_id: int | None) -> bool:
        is_first = (reason, env_id) not in self._logged
        self._logged.add((reason, env_id))
        return is_first

    def _raise_if_systematic(self, problems: list[UnusableGroup]) -> None:
        first = problems[0]
        counts = ", ".join(f"{r} {n}" for r, n in Counter(p.reason for p in problems).items())
        by_reason = f"Unusable groups of the newest batch, by reason: {counts}."
        newest = list(self._tallies)[-MAX_UNUSABLE_BATCHES:]
        if len(newest) == MAX_UNUSABLE_BATCHES and all(0 < t.groups == t.unusable for t in newest):
            raise UnusableGroup(
                first.reason,
                f"{first}\n\nNone of the last {MAX_UNUSABLE_BATCHES} batches has a group that the "
                f"trainer can train on. {by_reason}",
            )
        unusable = sum(tally.unusable for tally in self._tallies)
        groups = sum(tally.groups for tally in self._tallies)
        if len(self._tallies) == WINDOW_BATCHES and 2 * unusable > groups:
            raise UnusableGroup(
                first.reason,
                f"{first}\n\n{unusable} of the {groups} groups of the last {WINDOW_BATCHES} "
                f"batches are unusable; at most half may be unusable. {by_reason}",
            )


@dataclass(frozen=True)
class _Seen:
    step: int
    groups: frozenset[bytes]


class RecentBatches:
    """Digests of the groups of recent batches: 16 bytes for each group."""

    def __init__(self, remembered: int = REMEMBERED_BATCHES) -> None:
        self._seen: deque[_Seen] = deque(maxlen=remembered)
        self._lone_repeats = 0

    def count_repeats(self, digests: Sequence[bytes], step: int) -> int:
        """Number of groups that were in an earlier batch, or twice in this one.

        Args: digests: of a batch's groups

        Raises:
            DuplicatedBatch: all of them were in one earlier batch. A second step on the same
                samples would bias the policy. A batch of one group is accepted once, because its
                environment may have repeated a submission after a lost answer.
        """
        batch = frozenset(digests)
        for seen in self._seen:
            if batch <= seen.groups and self._is_duplicate(batch):
                raise DuplicatedBatch(
                    f"step {step}: all {len(digests)} groups of this batch were already in the "
                    f"batch of step {seen.step}, with the same tokens, logprobs and scores. The "
                    "trainer did not train on this batch. Check in run-api's log whether run-api "
                    "handed out one batch twice, or an environment submitted groups twice"
                )
        known = frozenset().union(*(seen.groups for seen in self._seen))
        self._seen.append(_Seen(step, batch))
        return sum(d in known for d in batch) + len(digests) - len(batch)

    def _is_duplicate(self, batch: frozenset[bytes]) -> bool:
        if len(batch) > 1:
            return True
        self._lone_repeats += 1
        return self._lone_repeats > 1


def digest(group: ScoredGroup) -> bytes:
    """A hash of a group's tokens, logprobs, scores and sampling seconds, if known. The seconds
    distinguish groups with equal completions, which a small model often samples."""
    state = blake2b(digest_size=_DIGEST_BYTES)
    logprobs = group.inference_logprobs or []
    seconds = RolloutFacts.of(group).generation_seconds
    for tokens in group.tokens:
        state.update(_length_prefixed(array("q", tokens)))
    for values in (*logprobs, group.scores, [] if seconds is None else [seconds]):
        state.update(_length_prefixed(array("d", values)))
    return state.digest()


def _length_prefixed(values: array[int] | array[float]) -> bytes:
    """The values with their count in front, so that different lists never give the same bytes."""
    return len(values).to_bytes(8, "little") + values.tobytes()
