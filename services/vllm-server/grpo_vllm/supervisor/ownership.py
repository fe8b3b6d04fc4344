"""Lets one server at a time have a name in a run, and a server that shares its weights be alone
in its run: a trainer writes into one server's memory.

    owner:<name>     the server of that name
    owner-alone      the server that shares its weights
    owners           set: the names

Both keys expire, so the name of a server whose host is lost is soon free.
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
local function other(key)
  local held = redis.call('GET', key)
  if held == ARGV[2] then
    redis.call('DEL', key)
    return nil
  end
  return held and held ~= ARGV[1] and held or nil
end
local found = other(KEYS[1]) or other(KEYS[2])
if not found and ARGV[5] == '1' then
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[3])) do
    found = found or other(ARGV[6] .. name)
  end
end
if found then
  return found
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('SADD', KEYS[3], ARGV[4])
if ARGV[5] == '1' then
  redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[3])
end
return ''
"""
"""Claims the name and, for a server that shares its weights, the whole run.

KEYS: the owner of the name, the owner of the run, the names. ARGV: this server; a server that has
ended, or ''; milliseconds; the name; '1' to claim the run; what precedes the name in KEYS[1].
Returns '' or the other server that is in the way."""
_RELEASE = """
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[1] then
    redis.call('DEL', key)
  end
end
"""


class ServerExists(GrpoError):
    """Another server has this name, or must be alone in this run."""


class Owner(BaseModel):
    """A server. `alone`: it shares its weights. `place`: its kernel and its namespace of process
    ids."""

    id: str
    host: str
    name: str
    alone: bool
    pid: int
    place: str

    @classmethod
    def this_process(cls, name: str, alone: bool) -> Owner:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            name=name,
            alone=alone,
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
    """The claim of this server in the run `run_id`. Args: alone: it shares its weights"""

    def __init__(self, url: str, run_id: str, name: str, alone: bool = False) -> None:
        super().__init__(url, TIMEOUT_S)
        self._prefix = run_prefix(run_id) + "owner:"
        self._keys = (self._prefix + name, run_prefix(run_id) + "owner-alone")
        self._names = run_prefix(run_id) + "owners"
        self._run_id = run_id
        self._owner = Owner.this_process(name, alone)
        self._written = self._owner.model_dump_json()

    async def claim(self) -> None:
        """Own the name, if Redis answers. Waits until the claim of a lost server has expired.
        Raises `ServerExists` if another server is in the way."""
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
        """Renew the claim for ever. Raises `ServerExists` if another server took it while this one
        could not renew its claim."""
        while True:
            await asyncio.sleep(RENEW_S)
            if (held := await self._ask()) is not None:
                raise self._exists(held)

    async def close(self) -> None:
        try:
            await self.attempt("EVAL", _RELEASE, 2, *self._keys, self._written)
        except FAILURES as error:
            log.info("run.not_released", reason=str(error) or type(error).__name__)
        await super().close()

    async def _ask(self, replaced: str = "") -> Owner | None:
        """Claim, or renew the claim; returns another owner."""
        owner, milliseconds = self._owner, int(KEPT_S * 1000)
        try:
            held = await self.attempt(
                *("EVAL", _CLAIM, 3, *self._keys, self._names, self._written, replaced),
                *(milliseconds, owner.name, int(owner.alone), self._prefix),
            )
        except FAILURES as error:
            self.note_absence(error)
            return None
        try:
            return Owner.model_validate_json(held) if held else None
        except ValidationError:
            return Owner(id="", host="unknown", name="", alone=False, pid=0, place="")

    def _exists(self, other: Owner) -> ServerExists:
        where = f"host {other.host}, process {other.pid}"
        if other.name == self._owner.name:
            return ServerExists(
                f"--server-name {other.name}: another vllm-api-server of run {self._run_id} has "
                f"this name ({where}); stop that server, or give this one another --server-name"
            )
        sharing = other.name if other.alone else self._owner.name
        return ServerExists(
            f"--run-id {self._run_id}: another vllm-api-server, {other.name}, serves this run "
            f"({where}), and {sharing} shares its weights with a trainer (--share-weights), so it "
            "must be the only server; stop one of the two, or start this one with another --run-id"
        )
