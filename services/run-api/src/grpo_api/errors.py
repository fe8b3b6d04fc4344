"""Why a well-formed request is not served.

GrpoError
├── Refused               4xx: it conflicts with the run's state, or can never be served
├── GroupRefused          the same, of one group of a submission
├── TrainerNotRegistered  a poll for a batch before any registration
├── Conflict              409, with a problem type by which a client tells them apart
│   ├── TrainerSuperseded     another trainer has registered since
│   ├── BatchesByLease        a poll that acknowledges, while the run's trainer takes leases
│   ├── BatchUnknown          no batch of the run has this id; 404 to an acknowledgement
│   ├── LeasesFull            unacknowledged batches hold all that they may
│   └── BatchGone             a batch was let go of, handed out again or reset while it was sent
├── BodyTooSlow           408: a body did not arrive in full in time
└── Unavailable           503: the same request may succeed later
    ├── BodiesFull            bodies under way hold all that they may
    ├── QueueFull             the queue stayed full for as long as a submission may wait
    ├── StoreUnavailable      Redis did not answer in time, or cannot take writes
    └── ShuttingDown          the server was told to stop
"""

from __future__ import annotations

from typing import Any, ClassVar

from grpo_core.errors import GrpoError


class Refused(GrpoError):
    """The request changed nothing. `detail` is what the caller reads."""

    def __init__(self, status: int, detail: str | list[dict[str, Any]]) -> None:
        super().__init__(str(detail))
        self.status = status
        self.detail = detail

    def __reduce__(self) -> tuple[type[Refused], tuple[int, str | list[dict[str, Any]]]]:
        """For the way between processes."""
        return Refused, (self.status, self.detail)


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

    def __init__(self) -> None:
        super().__init__("Trainer not registered. Call /register first.")


class Conflict(GrpoError):
    """Attributes:
    parameter: the one of the query that conflicts.
    kind: what the answer gives as the problem's type.
    """

    parameter: ClassVar[str]
    kind: ClassVar[str]

    def problems(self) -> list[dict[str, Any]]:
        return [{"loc": ["query", self.parameter], "msg": str(self), "type": self.kind}]


class TrainerSuperseded(Conflict):
    parameter, kind = "trainer", "trainer_superseded"

    def __init__(self) -> None:
        super().__init__(
            "another trainer has registered for this run, and its batches are that trainer's now; "
            "stop one of the two, or give them run ids of their own"
        )


class BatchesByLease(Conflict):
    parameter, kind = "trainer", "batches_by_lease"

    def __init__(self) -> None:
        super().__init__(
            "the run's trainer takes batches by lease, and this poll would take one away from it; "
            "POST /register first, or ask with ?trainer=<uuid>&after=<batch id>"
        )


class BatchUnknown(Conflict):
    parameter, kind = "after", "batch_unknown"

    def __init__(self, batch_id: int, last: int) -> None:
        super().__init__(
            f"no batch {batch_id} was ever handed out in this run: the last one is {last}; was the "
            "run reset, or does the id come from another run?"
        )


class LeasesFull(Conflict):
    parameter, kind = "after", "leases_full"

    def __init__(self, stored_bytes: int, limit: int) -> None:
        super().__init__(
            f"batches that are not acknowledged hold {stored_bytes} bytes, and --max-leased-bytes "
            f"is {limit}; save the trainer's state and POST /batch/<id>/ack"
        )


class BatchGone(Conflict):
    parameter, kind = "after", "batch_gone"

    def __init__(self, batch_id: int) -> None:
        super().__init__(
            f"batch {batch_id} was acknowledged, handed out again, or the run reset, while "
            "it was sent"
        )


class BodyTooSlow(GrpoError):
    def __init__(self, received_bytes: int, deadline_s: float) -> None:
        super().__init__(
            f"of the body {received_bytes} bytes arrived within {deadline_s:g} s; send it again, "
            "as gzip or in smaller parts where the connection is slow"
        )


class Unavailable(GrpoError):
    """The same request may succeed later."""


class BodiesFull(Unavailable):
    def __init__(self, held_bytes: int) -> None:
        super().__init__(
            f"requests under way hold {held_bytes} bytes of bodies, and there is no room for this "
            "one; nothing was queued: send it again in a moment"
        )


class QueueFull(Unavailable):
    def __init__(self, waited_s: float) -> None:
        super().__init__(
            f"the queue has been full for {waited_s:.0f} s; the trainer does not keep up or is "
            "gone. Nothing was queued: send the same groups again later"
        )


class StoreUnavailable(Unavailable):
    """Redis did not answer within the deadline, or cannot take writes."""


class ShuttingDown(Unavailable):
    def __init__(self) -> None:
        super().__init__("the server is shutting down; send the same request again in a moment")


def unprocessable(location: list[str | int], message: str) -> Refused:
    """A 422 of the same shape as a validation error, for rules that depend on the run's state."""
    return Refused(422, [_problem(location, message, "unservable")])


def _problem(location: list[str | int], message: str, kind: str) -> dict[str, Any]:
    return {"loc": ["body", *location], "msg": message, "type": kind}
