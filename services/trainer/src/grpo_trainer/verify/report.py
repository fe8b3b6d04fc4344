"""What a rollout mismatch tells its reader: the numbers, what was tried, the likeliest cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_trainer.verify.causes import Cause, Hypothesis

MISMATCH = "LogProb Alignment: MISMATCH!"
UNCHANGED = "No weight was changed by this step."

_EXPLAINS = 2.0
"""Factor by which the best assumption must reduce the difference to be called the cause."""


@dataclass(frozen=True)
class ServerAnswer:
    """`mean`: |server's - trainer's log-probability| of the same tokens, asked now; None where the
    server did not answer."""

    mean: float | None
    text: str


@dataclass(frozen=True)
class MismatchReport:
    """Args:
    what: which tokens, and how far off they are
    sent: mean |difference| as sent
    tried: the same under other assumptions
    server: None where it was not asked
    tolerance: of the data type
    """

    what: str
    sent: float
    tried: Sequence[Hypothesis]
    server: ServerAnswer | None
    tolerance: float

    def __str__(self) -> str:
        lines = [
            f"{MISMATCH} {self.what}",
            "Mean |difference|:",
            f"  as sent: {self.sent:.2g}",
            *(f"  {hypothesis.assumption}: {hypothesis.mean:.2g}" for hypothesis in self._best()),
        ]
        if self.server is not None:
            lines.append(f"  between server and trainer, asked now: {self.server.text}")
        return "\n".join([*lines, f"{self._verdict()} {UNCHANGED}"])

    def _best(self) -> list[Hypothesis]:
        return sorted(self.tried, key=lambda hypothesis: hypothesis.mean)

    def _verdict(self) -> str:
        if self.server is not None and (self.server.mean or 0.0) > self.tolerance:
            return f"Likely cause: {Cause.STALE_WEIGHTS}."
        best = self._best()
        if best and _EXPLAINS * best[0].mean < self.sent:
            return f"Likely cause: {best[0].cause}."
        causes = "; ".join(f"({i}) {cause}" for i, cause in enumerate(Cause, start=1))
        return f"None of these explains it. What to look at, in this order: {causes}."
