"""Lets one server at a time serve a run: two would both answer the trainer's commands.

The owner is a Redis key that expires, so the run of a server whose host is lost is soon free.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from pathlib import Path

import structlog
from pydantic import BaseModel, ValidationError

from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.redis.connection import FAILURES, AsyncRedisConnection
from grpo_core.redis.keys import run_prefix

log = structlog.get_logger()

KEPT_S = 10.0
RENEW_S = 2.0
ASK_AGAIN_S = 0.5
TIMEOUT_S = 2.0
_CLAIM = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] and held ~= ARGV[2] then
  return held
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return ''
"""
"""KEYS: the owner. ARGV: this server; a server that has ended, or ''; milliseconds. Returns '' or
the other server that owns the run."""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
"""


class ServerExists(GrpoError):
    """Another server serves this run."""


class Owner(BaseModel):
    """A server. `place`: its kernel and its namespace of process ids."""

    id: str
    host: str
    port: int
    pid: int
    place: str

    @classmethod
    def this_process(cls, port: int) -> Owner:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            port=port,
            pid=os.getpid(),
            place=f"{boot} {Path('/proc/self/ns/pid').readlink()}",
        )

    def has_ended(self, seen_by: Owner) -> bool:
        """True if this is certain: the process was on the same machine, and is no more."""
        if self.place != seen_by.place:
            return False
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except FileNotFoundError:
            return True
        return self.pid == seen_by.pid or stat.rpartition(")")[2].split()[0] == "Z"


class RunOwner(AsyncRedisConnection):
    """The claim of this server to the run `run_id`. Args: port: its own, for messages"""

    def __init__(self, url: str, run_id: str, port: int) -> None:
        super().__init__(url, TIMEOUT_S)
        self._key = run_prefix(run_id) + "server:owner"
        self._run_id = run_id
        self._owner = Owner.this_process(port)
        self._written = self._owner.model_dump_json()

    async def claim(self) -> None:
        """Own the run, if Redis answers. Waits until the claim of a lost server has expired. Raises
        `ServerExists` if another server owns it."""
        deadline = Deadline(KEPT_S + RENEW_S)
        replaced = ""
        while (held := await self._ask(replaced)) is not None:
            if held.has_ended(self._owner):
                replaced = held.model_dump_json()
            elif deadline.has_passed:
                raise self._exists(held)
            else:
                await asyncio.sleep(ASK_AGAIN_S)

    async def hold(self) -> None:
        """Renew the claim for ever. Raises `ServerExists` if another server took the run while this
        one could not renew its claim."""
        while True:
            await asyncio.sleep(RENEW_S)
            if (held := await self._ask()) is not None:
                raise self._exists(held)

    async def close(self) -> None:
        try:
            await self.attempt("EVAL", _RELEASE, 1, self._key, self._written)
        except FAILURES as error:
            log.info("run.not_released", reason=str(error) or type(error).__name__)
        await super().close()

    async def _ask(self, replaced: str = "") -> Owner | None:
        """Claim the run, or renew the claim; returns another owner."""
        milliseconds = int(KEPT_S * 1000)
        try:
            held = await self.attempt(
                *("EVAL", _CLAIM, 1, self._key, self._written, replaced, milliseconds)
            )
        except FAILURES as error:
            self.note_absence(error)
            return None
        try:
            return Owner.model_validate_json(held) if held else None
        except ValidationError:
            return Owner(id="", host="unknown", port=0, pid=0, place="")

    def _exists(self, other: Owner) -> ServerExists:
        return ServerExists(
            f"--run-id {self._run_id}: another vllm-api-server serves this run (host {other.host}, "
            f"port {other.port}, process {other.pid}), and both would answer the trainer's "
            "commands; stop that server, or start this one with another --run-id"
        )
