"""Ends an environment whose rewards fail for too many groups."""

from __future__ import annotations

from collections import deque

from grpo_core.errors import GrpoError

_RECENT_GROUPS = 64
_LEAST_GROUPS = 8
"""Fewer groups prove nothing."""


class RewardsFail(GrpoError):
    """Too many groups could not be graded, so the reward is probably wrong."""


class RewardFailures:
    """Counts groups whose rewards failed, among the recent ones.

    Args: share: largest share that is allowed, in [0, 1]
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._recent: deque[bool] = deque(maxlen=_RECENT_GROUPS)

    def graded(self) -> None:
        self._recent.append(False)

    def failed(self, problem: str) -> None:
        """Record a group that could not be graded.

        Raises:
            RewardsFail: the share among the recent groups is too large.
        """
        self._recent.append(True)
        failed, groups = sum(self._recent), len(self._recent)
        if groups >= _LEAST_GROUPS and failed > self._share * groups:
            raise RewardsFail(
                f"the reward failed for {failed} of the last {groups} groups, more than the share "
                f"of {self._share:g} that --max-failed-rewards allows; the last problem was: "
                f"{problem}; try the reward with `env-server check`"
            )
