"""Errors that several services raise.

GrpoError                     base of all errors of this system
├── ServiceUnavailable        a service did not answer within the deadline
│   └── AnswerLost            the answer was lost; the request may have been carried out
├── RequestRefused            a service answered 4xx: the request is wrong, a retry is useless
│   ├── TrainerSuperseded     another trainer has registered for the run
│   ├── LeasesFull            batches must be acknowledged before run-api leases another one
│   └── UnknownBatch          the run at run-api never handed out this batch
├── ProtocolViolation         the answer of a service breaks the protocol
├── OtherProtocol             the service is of a release that does not work with this one
├── ModelNotFound             a model does not exist or cannot be downloaded
├── BrokenRollouts            recorded rollouts cannot be read
├── BrokenProvenance          the record of where weights come from cannot be read
└── WandbUnavailable          Weights & Biases was requested and does not start
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError


class GrpoError(Exception):
    """Base of all errors of this system. Messages name the problem, the place and the fix."""


class ServiceUnavailable(GrpoError):
    """A service gave no answer, or only 5xx answers, until the deadline."""


class AnswerLost(ServiceUnavailable):
    """The connection broke before a service answered. The client did not repeat the request,
    because the service may have carried it out."""


class RequestRefused(GrpoError):
    """A service refused the request with a 4xx status.

    `kinds`: the `type` of every problem in the answer.
    """

    def __init__(self, message: str, status: int, kinds: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.status = status
        self.kinds = kinds


class TrainerSuperseded(RequestRefused):
    """A newer trainer has registered for the run and now receives the run's batches."""


class LeasesFull(RequestRefused):
    """The unacknowledged batches have reached the size `--max-leased-bytes` of run-api."""


class UnknownBatch(RequestRefused):
    """A request names a batch that run-api never handed out in this run."""


class ProtocolViolation(GrpoError):
    """A service sent an answer that its HTTP API does not allow."""


class OtherProtocol(GrpoError):
    """The service is of a release that does not work with this program's."""


class ModelNotFound(GrpoError):
    """The model does not exist, or cannot be downloaded."""


class BrokenRollouts(GrpoError):
    """A directory or file of recorded rollouts cannot be read. The message names file and line."""


class BrokenProvenance(GrpoError):
    """`provenance.jsonl` or a recorded batch is missing or cannot be read. The message names it."""


class WandbUnavailable(GrpoError):
    """Weights & Biases did not start."""


class TrackioUnavailable(GrpoError):
    """Trackio did not start."""


@contextmanager
def parsing(what: str, invalid: type[GrpoError] = ProtocolViolation) -> Iterator[None]:
    """Raise the error `invalid`, with the invalid fields of `what`, for that of pydantic."""
    try:
        yield
    except ValidationError as error:
        raise invalid(f"{what}: {problems_of(error)}") from error


_MAX_LISTED = 3


def problems_of(error: ValidationError) -> str:
    """`scores.0: Input should be a valid number; tokens: Field required (and 2 more)`"""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    listed = [
        f"{'.'.join(map(str, problem['loc'])) or 'value'}: {message_of(problem)}"
        for problem in found[:_MAX_LISTED]
    ]
    more = len(found) - len(listed)
    return "; ".join(listed) + (f" (and {more} more)" if more else "")


def message_of(problem: Any) -> str:
    """The message of one entry of `ValidationError.errors()`, without pydantic's prefix."""
    message: str = problem["msg"]
    return message.removeprefix("Value error, ")
