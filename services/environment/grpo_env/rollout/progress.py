"""Counts groups for the regular log report, and collects the rewards of all graded groups."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from grpo_core.wire import scored_group as wire
from grpo_env.rollout.grading import Grade
from grpo_env.rollout.outcome import FailureReason, Rollout, RolloutFailure

_REPORT_EVERY_S = 5.0
_RECENT_GROUPS = 64


@dataclass
class RewardSample:
    """Rewards since the last submission, including those of dropped groups.

    The mean over submitted groups alone would be biased: groups with equal scores are dropped, and
    those are the prompts that the policy always or never solves.
    """

    total: float = 0.0
    count: int = 0
    parts: Counter[str] = field(default_factory=Counter)

    def add(self, grades: Iterable[Grade]) -> None:
        for grade in grades:
            self.total += grade.score
            self.count += 1
            self.parts.update(grade.parts)

    def take(self) -> RewardSample:
        """Return the rewards so far and start again at zero."""
        taken = RewardSample(self.total, self.count, self.parts)
        self.total, self.count, self.parts = 0.0, 0, Counter()
        return taken

    def give_back(self, taken: RewardSample) -> None:
        self.total += taken.total
        self.count += taken.count
        self.parts.update(taken.parts)

    def on_the_wire(self) -> wire.RewardSample:
        return wire.RewardSample(sum=self.total, count=self.count, parts=dict(self.parts))


@dataclass
class _Window:
    """Counts since the last report."""

    started: float
    rewards: RewardSample = field(default_factory=RewardSample)
    graded_groups: int = 0
    equal_groups: int = 0
    tokens: int = 0
    graded_tokens: int = 0


class Progress:
    """Counts groups over the whole run, and means and rates since the last report."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window = _Window(clock())
        self.groups_sent = 0
        self.failures: Counter[FailureReason] = Counter()
        self._recent: deque[bool] = deque(maxlen=_RECENT_GROUPS)  # whether each was kept

    @property
    def kept_share(self) -> float:
        """Share of the recent groups that were not dropped for equal scores; 1 at the start."""
        return (1 + sum(self._recent)) / (1 + len(self._recent))

    def record(self, outcome: Rollout | RolloutFailure) -> None:
        """Count one sampled group. `groups_sent` is counted separately."""
        self._window.tokens += outcome.completion_tokens
        self._window.rewards.add(outcome.grades)
        if outcome.grades:
            self._window.graded_groups += 1
            self._window.graded_tokens += outcome.completion_tokens
        has_equal_scores = False
        if isinstance(outcome, RolloutFailure):
            self.failures[outcome.reason] += 1
            has_equal_scores = outcome.reason is FailureReason.EQUAL_SCORES
        self._window.equal_groups += has_equal_scores
        self._recent.append(not has_equal_scores)

    def report_if_due(self) -> dict[str, Any] | None:
        """The fields of the next report; None if it is not due yet."""
        is_due = self._clock() - self._window.started >= _REPORT_EVERY_S
        return self.report() if is_due else None

    def report(self) -> dict[str, Any]:
        """The fields of a report on the time since the previous one."""
        elapsed_s = self._clock() - self._window.started
        window, self._window = self._window, _Window(self._clock())
        return {
            "groups_sent": self.groups_sent,
            "failures": {reason.value: count for reason, count in sorted(self.failures.items())},
            "mean_reward": _ratio(window.rewards.total, window.rewards.count),
            "reward_parts": {
                name: _ratio(total, window.rewards.count)
                for name, total in sorted(window.rewards.parts.items())
            },
            "mean_completion_tokens": _ratio(window.graded_tokens, window.rewards.count),
            "equal_scores_share": _ratio(window.equal_groups, window.graded_groups),
            "tokens_per_s": round(window.tokens / elapsed_s, 1) if elapsed_s else None,
        }


def _ratio(part: float, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
