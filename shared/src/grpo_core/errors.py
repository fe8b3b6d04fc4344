"""Errors that more than one service raises.

GrpoError                     everything this system raises on purpose
├── ServiceUnavailable        a service did not answer within its deadline
│   └── AnswerLost            the request may have been carried out; its answer never came
├── RequestRefused            a service answered 4xx: the request is wrong, retrying is useless
│   ├── TrainerSuperseded     another trainer has registered for the run
│   ├── LeasesFull            nothing new is handed out before batches are acknowledged
│   └── UnknownBatch          the run at run-api has not handed out such a batch
└── ProtocolViolation         a service answered something the contract does not allow
"""

from __future__ import annotations


class GrpoError(Exception):
    """Base of every error raised on purpose. The message says what, where and what to do next."""


class ServiceUnavailable(GrpoError):
    """A service did not answer, or answered 5xx, until the deadline passed."""


class AnswerLost(ServiceUnavailable):
    """The connection broke behind a request that must not be sent twice blindly."""


class RequestRefused(GrpoError):
    """A service refused the request with a 4xx status.

    `kinds`: the `type` of every problem that the answer lists.
    """

    def __init__(self, message: str, status: int, kinds: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.status = status
        self.kinds = kinds


class TrainerSuperseded(RequestRefused):
    """Another trainer has registered for the run: its batches are that trainer's now."""


class LeasesFull(RequestRefused):
    """The batches that this trainer has not acknowledged hold all that they may."""


class UnknownBatch(RequestRefused):
    """A batch was named that the run at run-api has not handed out."""


class ProtocolViolation(GrpoError):
    """An answer breaks the wire contract."""
