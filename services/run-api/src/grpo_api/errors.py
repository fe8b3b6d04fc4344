"""Why a well-formed request is not served.

GrpoError
├── Refused               4xx: it conflicts with the run's state, or can never be served
├── GroupRefused          the same, of one group of a submission
├── TrainerNotRegistered  a poll for a batch before any registration
└── StoreUnavailable      503: Redis did not answer in time; the same request may succeed later
"""

from __future__ import annotations

from typing import Any

from grpo_core.errors import GrpoError


class Refused(GrpoError):
    """The request changed nothing. `detail` is what the caller reads."""

    def __init__(self, status: int, detail: str | list[dict[str, Any]]) -> None:
        super().__init__(str(detail))
        self.status = status
        self.detail = detail


class GroupRefused(GrpoError):
    """Group `index` of a submission cannot be taken, so none of them is.

    Attributes:
        is_final: False where the same group may be taken later.
    """

    def __init__(self, index: int, reason: str, *, is_final: bool = True) -> None:
        super().__init__(reason)
        self.index = index
        self.is_final = is_final

    def at(self, *location: str | int) -> Refused:
        """As an answer that names where in the body the group stands."""
        if self.is_final:
            return unprocessable([*location], str(self))
        return Refused(409, [_problem([*location], str(self), "buffer_full")])


class TrainerNotRegistered(GrpoError):
    """There is no run to hand batches out for."""


class StoreUnavailable(GrpoError):
    """Redis did not answer within the deadline, or cannot take writes."""


def unprocessable(location: list[str | int], message: str) -> Refused:
    """A 422 of the same shape as a validation error, for rules that depend on the run's state."""
    return Refused(422, [_problem(location, message, "unservable")])


def _problem(location: list[str | int], message: str, kind: str) -> dict[str, Any]:
    return {"loc": ["body", *location], "msg": message, "type": kind}
