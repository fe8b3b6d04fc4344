"""Filters a batch: counts repeated groups and drops stale and unusable ones.

A single bad group is counted, and training continues with the rest. Many bad groups mean a broken
environment: the run ends with an error that names the reason.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import structlog

from grpo_core.clients.run_api import LeasedBatch
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup
from grpo_trainer.data.groups import GroupLimits, UsableSequence, usable_sequences
from grpo_trainer.data.receipts import check_receipts
from grpo_trainer.errors import DuplicatedBatch, RolloutMismatch, UnusableGroup, UnusableReason

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
Checked = list[UsableSequence] | UnusableGroup | RolloutMismatch
"""Of a group: its sequences, or why it cannot be trained on, or must not be."""


@dataclass(frozen=True)
class VersionHistory:
    """The policy versions with which this trainer started.

    Args:
        first: the version of its starting weights; all later epochs are its own too
        begun_as: another version under which the server served the same weights, if any
        epochs: that this trainer and earlier ones of the run have started; None if that is unknown
    """

    first: PolicyVersion
    begun_as: PolicyVersion | None = None
    epochs: Container[int] | None = None

    def own(self, version: PolicyVersion) -> PolicyVersion:
        """This trainer's version of these weights, if the server used the other one."""
        return self.first if version == self.begun_as else version

    def age(self, version: PolicyVersion, step: int) -> int:
        """Number of updates between the weights of `version` and those after `step` steps.

        Steps that an earlier trainer took after its last checkpoint are lost. The age of such
        weights is their distance back to the checkpoint plus the distance forward from it.
        """
        if version.epoch >= self.first.epoch:
            return step - version.step
        return step - self.first.step + abs(version.step - self.first.step)


NO_HISTORY = VersionHistory(PolicyVersion(0, 0))


class GroupFilter:
    """Filters batches. Remembers recent batches and the warnings that were logged.

    Args:
        limits: the policy's vocabulary size and sequence length
        history: computes how stale groups are
        max_staleness: older groups are dropped; in steps, None for no limit
    """

    def __init__(
        self,
        limits: GroupLimits,
        history: VersionHistory = NO_HISTORY,
        max_staleness: int | None = None,
    ) -> None:
        self._limits = limits
        self._history = history
        self._max_staleness = max_staleness
        self._batches = RecentBatches()
        self._recent: deque[tuple[int, int]] = deque(maxlen=WINDOW_BATCHES)
        """Of each batch: unusable groups, and all groups."""
        self._logged: set[tuple[str, int | None]] = set()
        self._next_repeat_warning = 0

    def check(self, leased: LeasedBatch) -> list[Checked]:
        """Check each group by its contents alone. Changes nothing, so a thread can do it ahead of
        `filter`."""
        pairs = zip(leased.groups, leased.received_under, strict=True)
        return [self._checked(index, *pair) for index, pair in enumerate(pairs)]

    def filter(
        self,
        leased: LeasedBatch,
        checked: Sequence[Checked],
        digests: Sequence[bytes],
        step: int,
    ) -> tuple[list[UsableSequence], Counter[str]]:
        """The sequences of a batch's usable groups, and how many groups are "unusable", "stale" or
        "repeated".

        Args:
            checked: of each group, as `check` returns it
            digests: of each group

        Raises:
            DuplicatedBatch: run-api delivered this batch before.
            RolloutMismatch: a group, even an old or unusable one, differs from its receipts.
            UnusableGroup: no group of three batches in a row, or less than half of the groups of
                the last 5 batches, can be trained on.
        """
        repeated = self._batches.count_repeats(digests, step)
        if repeated and step >= self._next_repeat_warning:
            log.warning(
                "trained_groups.received_again",
                groups=repeated,
                batch_groups=len(digests),
                step=step,
            )
            self._next_repeat_warning = step + REPEAT_EVERY_STEPS
        usable: list[UsableSequence] = []
        problems: list[UnusableGroup] = []
        stale = 0
        rows = zip(leased.groups, leased.received_under, checked, strict=True)
        for group, received_under, result in rows:
            if isinstance(result, RolloutMismatch):
                raise result
            if self._is_stale(group, received_under, step):
                stale += 1
                continue
            if isinstance(result, UnusableGroup):
                problems.append(result)
            else:
                usable += result
            self._log_first(group, result)
        self._recent.append((len(problems), len(checked) - stale))
        if problems:
            self._raise_if_systematic(problems)
        return usable, Counter(unusable=len(problems), stale=stale, repeated=repeated)

    def _checked(
        self, index: int, group: ScoredGroup, received_under: PolicyVersion | None
    ) -> Checked:
        try:
            check_receipts(index, group)
            found = usable_sequences(index, group, self._limits)
        except (RolloutMismatch, UnusableGroup) as problem:
            return problem
        own, epochs = self._history.own, self._history.epochs
        used = {own(v) for versions in RolloutFacts.of(group).policy_version for v in versions}
        if epochs is not None and (of_others := [v for v in used if v.epoch not in epochs]):
            return UnusableGroup(
                UnusableReason.UNPUBLISHED,
                f"group {index} was sampled from weights that no trainer of this run published: "
                f"policy version {tuple(of_others[0])}. Were weights loaded by hand?",
            )
        under = None if received_under is None else own(received_under)
        named = [s.versions and (own(s.versions[0]), own(s.versions[1])) for s in found]
        pairs = zip(found, named, strict=True)
        return [replace(s, versions=versions, received_under=under) for s, versions in pairs]

    def _is_stale(
        self, group: ScoredGroup, received_under: PolicyVersion | None, step: int
    ) -> bool:
        """Whether a completion's first token is older than allowed, or `received_under` if the
        group names no version. A group without both counts as fresh enough."""
        if self._max_staleness is None:
            return False
        versions = [first for first, _ in RolloutFacts.of(group).policy_version]
        if not versions and received_under is not None:
            versions = [received_under]
        ages = (self._history.age(self._history.own(version), step) for version in versions)
        return any(age > self._max_staleness for age in ages)

    def _log_first(self, group: ScoredGroup, result: object) -> None:
        """Log a problem, and advantages of the environment, once for each environment."""
        if isinstance(result, UnusableGroup) and self._is_first(result.reason, group.env_id):
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
                reason="the environment sends advantages, so the trainer computes none",
            )

    def _is_first(self, reason: str, env_id: int | None) -> bool:
        is_first = (reason, env_id) not in self._logged
        self._logged.add((reason, env_id))
        return is_first

    def _raise_if_systematic(self, problems: list[UnusableGroup]) -> None:
        first = problems[0]
        counts = ", ".join(f"{r} {n}" for r, n in Counter(p.reason for p in problems).items())
        told = ""
        newest = [*self._recent][-MAX_UNUSABLE_BATCHES:]
        unusable, groups = (sum(column) for column in zip(*self._recent, strict=True))
        if len(newest) == MAX_UNUSABLE_BATCHES and all(0 < bad == total for bad, total in newest):
            told = f"None of the last {MAX_UNUSABLE_BATCHES} batches has a group to train on."
        elif len(self._recent) == WINDOW_BATCHES and 2 * unusable > groups:
            told = (
                f"{unusable} of the {groups} groups of the last {WINDOW_BATCHES} batches are "
                "unusable; at most half may be unusable."
            )
        if told:
            by_reason = f"Unusable groups of the newest batch, by reason: {counts}."
            raise UnusableGroup(first.reason, f"{first}\n\n{told} {by_reason}")


class RecentBatches:
    """Digests of the groups of recent batches: 16 bytes for each group."""

    def __init__(self, remembered: int = REMEMBERED_BATCHES) -> None:
        self._seen: deque[tuple[int, frozenset[bytes]]] = deque(maxlen=remembered)
        """Of each batch: its step, and its groups."""
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
        for earlier, groups in self._seen:
            if batch <= groups and self._is_duplicate(batch):
                raise DuplicatedBatch(
                    f"step {step}: all {len(digests)} groups of this batch were already in the "
                    f"batch of step {earlier}, with the same tokens, logprobs and scores. The "
                    "trainer did not train on this batch. Check in run-api's log whether run-api "
                    "handed out one batch twice, or an environment submitted groups twice"
                )
        known = frozenset().union(*(groups for _, groups in self._seen))
        self._seen.append((step, batch))
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
