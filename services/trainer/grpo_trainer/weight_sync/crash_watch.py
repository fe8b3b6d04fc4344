"""Ends the run if a request of the trainer crashes the server's engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from grpo_trainer.errors import EngineCrashed

log = structlog.get_logger()

TOLERATED_CRASHES = 1


@dataclass
class CrashWatch:
    """Counts the engine's crashes while the trainer waits for the answer to one request.

    Anything may end an engine once, so the trainer repeats the request after the first crash. If
    the engine crashes again, the request itself is the likely cause.

    Args:
        request: names the request in messages
    """

    request: str
    _crashes: int = field(init=False, default=0)

    def note(self, crashes: int) -> bool:
        """Whether the engine has crashed since the previous call.

        Args:
            crashes: number of crashes since the request was first sent

        Raises:
            EngineCrashed: the engine has crashed twice.
        """
        if crashes <= self._crashes:
            return False
        self._crashes = crashes
        if crashes > TOLERATED_CRASHES:
            raise EngineCrashed(
                f"the server's engine crashed {crashes} times while the trainer waited for "
                f"{self.request}, so this request probably crashes it. Read the lines before "
                "engine.crashed in the server's log (logs/vllm-server.log of a local run; "
                "vllm_server.log in --save-path if grpo started the server). Fix the cause, then "
                "start the trainer again to resume from its newest checkpoint"
            )
        log.warning(
            "engine.crashed_during_check",
            request=self.request,
            hint="the trainer repeats the request once; read the server's log",
        )
        return True
