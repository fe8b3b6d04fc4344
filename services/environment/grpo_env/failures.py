"""Failures that say nothing of an answer: no score comes of them."""

from __future__ import annotations

import errno
import traceback

_OF_HOST = frozenset(
    {errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EIO}
)
_UNANSWERED = frozenset(
    {
        *("ConnectionError", "gaierror"),  # Python, requests
        *("Timeout", "NetworkError", "TimeoutException", "RemoteProtocolError"),  # requests, httpx
        *("ClientConnectionError", "APIConnectionError"),  # aiohttp, and OpenAI's and Anthropic's
    }
)
"""Names of classes, as this process has not all of their libraries."""
_CONNECTIONS = ("socket", "ssl", "aiohttp")
"""Modules whose `TimeoutError` has no class of its own."""
_TOO_MANY = 429


class RolloutFailed(Exception):
    """A rollout ended with an error. Its group is lost and counted, and the run goes on. A tool or
    a reward raises it, too, if what it needs does not work now."""

    of_machine = True


def is_of_machine(error: BaseException | None) -> bool:
    """Whether the machine or a service failed, and not the code or its arguments: a connection
    failed, a service answered 429 or 5xx, or memory, disk, files or processes ran out. Its causes
    (`raise … from`, and those of an OSError, as urllib's) count, too. A broken pipe does not: its
    program may be the model's."""
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        is_unanswered = names & _UNANSWERED and not isinstance(error, BrokenPipeError)
        if getattr(error, "of_machine", False) or is_unanswered:
            return True
        if isinstance(error, OSError) and error.errno in _OF_HOST:
            return True
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        raised_in = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
        if isinstance(error, TimeoutError) and raised_in.partition(".")[0] in _CONNECTIONS:
            return True
        if (status := _status(error)) == _TOO_MANY or 500 <= status < 600:
            return True
        error = error.__cause__ or (error.__context__ if isinstance(error, OSError) else None)
    return False


def _status(error: BaseException) -> int:
    """Of the HTTP answer that an error is about; 0 if it is about none."""
    answer = getattr(error, "response", None)  # false for requests, if its status is an error
    about = error if answer is None else answer
    found = (getattr(about, name, None) for name in ("status_code", "status", "code"))
    return next((status for status in found if isinstance(status, int)), 0)
