"""The versions of a run in Redis: announced by its trainer, followed by its servers.

The keys have the run's prefix:

    weights:versions           stream of `Announcement`s; an entry's id is its version
    weights:sources:<id>       set: the trainer's URLs below which the version's directory is
    weights:peers:<id>         set: URLs of servers that have a copy of it
    weights:slot:<url>:<k>     the server that fetches from this source; expires unless renewed
    weights:group              see `grpo_core.weights.collective`

Redis refuses an entry whose id is not above the last one. So a trainer that was replaced by a newer
one, which began a new epoch, cannot announce anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.redis.connection import FAILURES, AsyncRedisConnection, RedisConnection, words
from grpo_core.redis.keys import run_prefix
from grpo_core.weights.collective import GroupAddress, group_key
from grpo_core.weights.servers import GONE_AFTER_S, ServerStatus, server_key, servers_key
from grpo_core.weights.versions import Announcement, version_id
from grpo_core.wire.policy_version import PolicyVersion

VERSIONS_KEPT = 1000
"""Length of the stream; older entries are deleted."""
SOURCES_KEPT_S = 7 * 24 * 3600
SLOT_S = 5.0
"""Lease of a fetcher on one of a source's slots. It is renewed with each chunk."""
SLOTS = 2
"""Servers that fetch from one source at once."""
BLOCK_MS = 1000
ATTEMPT_S = 5.0
_REFUSED = "equal or smaller"
"""Part of Redis' message for an id that is not above the last one."""
_SERVERS = """
local found = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  found[#found + 1] = redis.call('HGETALL', ARGV[1] .. name)
end
return found
"""
"""In one round trip, because the trainer asks ten times a second while it publishes."""
_SLOT = """
for number, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[1] or redis.call('SET', key, ARGV[1], 'NX') then
    redis.call('PEXPIRE', key, ARGV[2])
    return number
  end
end
return 0
"""
"""Holds the first of the slots that is free; returns its number from 1 on, or 0."""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
"""
_REPORT = """
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
"""In one step: a status that never expires would be that of a server that is never gone."""


class Slot(NamedTuple):
    """`number`: of the slots of one source, from 0 on."""

    source: str
    number: int


def versions_key(run_id: str) -> str:
    return run_prefix(run_id) + "weights:versions"


def sources_key(run_id: str, version: PolicyVersion) -> str:
    return run_prefix(run_id) + f"weights:sources:{version_id(version)}"


def peers_key(run_id: str, version: PolicyVersion) -> str:
    return run_prefix(run_id) + f"weights:peers:{version_id(version)}"


def slot_key(run_id: str, slot: Slot) -> str:
    return run_prefix(run_id) + f"weights:slot:{slot.source}:{slot.number}"


def _servers_of(run_id: str) -> tuple[str, int, str, str]:
    return _SERVERS, 1, servers_key(run_id), server_key(run_id, "")


def _statuses(found: Iterable[list[str]]) -> list[ServerStatus]:
    """By name. Raises `ProtocolViolation`."""
    records = (dict(zip(flat[::2], flat[1::2], strict=True)) for flat in found if flat)
    return sorted(map(ServerStatus.from_wire, records), key=lambda server: server.name)


class TrainerReplaced(GrpoError):
    """Another trainer has announced weights of a newer version for this run."""


class VersionLog(RedisConnection):
    """The trainer's view. Retries every call while Redis is unreachable, until `deadline_s` has
    passed.

    Args:
        url: of Redis
        run_id: the run of the servers; it may be set later

    Raises (every method):
        ServiceUnavailable: Redis did not answer in time.
        ProtocolViolation: a record in Redis is invalid.
    """

    def __init__(self, url: str, run_id: str, deadline_s: float) -> None:
        super().__init__(url, ATTEMPT_S, deadline_s)
        self.run_id = run_id

    def announce(self, announced: Announcement, sources: Sequence[str] = ()) -> None:
        """Add the version and its sources. Does nothing if exactly this version is the newest.

        Raises:
            TrainerReplaced: a version that is not older was announced by somebody else.
        """
        if sources:
            key = sources_key(self.run_id, announced.version)
            self.call("SADD", key, *sources)
            self.call("EXPIRE", key, SOURCES_KEPT_S)
        fields = words(announced.on_the_wire())
        key, deadline = versions_key(self.run_id), Deadline(self.deadline_s)
        while True:
            try:
                self.attempt("XADD", key, "MAXLEN", "~", VERSIONS_KEPT, announced.id, *fields)
                return
            except FAILURES as error:
                if _REFUSED not in str(error):
                    self.pause(deadline, error)
                    continue
            head = self.head()
            if head == announced:  # the answer to an earlier attempt was lost
                return
            newest = "unknown" if head is None else str(tuple(head.version))
            raise TrainerReplaced(
                f"run {self.run_id!r}: policy version {tuple(announced.version)} cannot be "
                f"announced, because the newest announced version is {newest}. Another trainer "
                "publishes to this run; stop one of the two, or give this one another --run-id"
            )

    def head(self) -> Announcement | None:
        """The newest version; None if none was announced yet."""
        found = self.call("XREVRANGE", versions_key(self.run_id), "+", "-", "COUNT", 1)
        return Announcement.from_wire(found[0][1]) if found else None

    def invite(self, address: GroupAddress) -> None:
        """Let the workers of the servers join this process group."""
        self.call("SET", group_key(self.run_id), address.model_dump_json())

    def servers(self) -> list[ServerStatus]:
        """All servers that are not gone, by name."""
        return _statuses(self.call("EVAL", *_servers_of(self.run_id)))

    def servers_for_report(self) -> list[ServerStatus]:
        """The same; empty if they are unreadable, so that a successful run does not fail."""
        try:
            return self.servers()
        except GrpoError:
            return []

    def forget(self, versions: Iterable[PolicyVersion]) -> None:
        """Remove the sources of versions whose files were deleted."""
        keys = [
            key(self.run_id, version) for version in versions for key in (sources_key, peers_key)
        ]
        if keys:
            self.call("DEL", *keys)


class ServerVersionLog(AsyncRedisConnection):
    """A server's view. Every method but `report` waits until Redis answers.

    Args:
        name: of the server
    """

    def __init__(self, url: str, run_id: str, name: str) -> None:
        super().__init__(url, ATTEMPT_S)
        self._run_id = run_id
        self._name = name

    async def head(self) -> Announcement | None:
        """The newest version; None if none was announced yet."""
        key = versions_key(self._run_id)
        found = await self.call("XREVRANGE", key, "+", "-", "COUNT", 1)
        return Announcement.from_wire(found[0][1]) if found else None

    async def group(self) -> str:
        """The trainer's newest `GroupAddress` as JSON; "" without one."""
        return str(await self.call("GET", group_key(self._run_id)) or "")

    async def next(self, after: PolicyVersion) -> Announcement | None:
        """The newest version above `after`. Waits up to a second for one; None if there is none."""
        key = versions_key(self._run_id)
        await self.call("XREAD", "COUNT", 1, "BLOCK", BLOCK_MS, "STREAMS", key, version_id(after))
        head = await self.head()
        return head if head is not None and head.version > after else None

    async def between(self, after: PolicyVersion, last: PolicyVersion) -> list[Announcement]:
        """The versions above `after` up to `last`, oldest first."""
        bounds = f"({version_id(after)}", version_id(last)
        found = await self.call("XRANGE", versions_key(self._run_id), *bounds)
        return [Announcement.from_wire(fields) for _, fields in found]

    async def sources(self, version: PolicyVersion) -> list[str]:
        """The trainer's."""
        return sorted(await self.call("SMEMBERS", sources_key(self._run_id, version)))

    async def peers(self, version: PolicyVersion, at_most: int) -> list[str]:
        """Other sources: some of the servers that have a copy. Hundreds may ask, and hundreds may
        have one."""
        return list(await self.call("SRANDMEMBER", peers_key(self._run_id, version), at_most))

    async def add_source(self, version: PolicyVersion, url: str) -> None:
        """Offer this server's copy."""
        key = peers_key(self._run_id, version)
        await self.call("SADD", key, url)
        await self.call("EXPIRE", key, SOURCES_KEPT_S)

    async def remove_source(self, version: PolicyVersion, url: str) -> None:
        await self.call("SREM", peers_key(self._run_id, version), url)

    async def take_slot(self, sources: Sequence[str]) -> Slot | None:
        """The first free slot of these sources, now held; None if all are taken."""
        slots = [Slot(source, number) for source in sources for number in range(SLOTS)]
        number = await self._hold(slots)
        return slots[number - 1] if number else None

    async def renew_slot(self, slot: Slot) -> bool:
        """Hold the slot for another `SLOT_S`; False if another server has it."""
        return bool(await self._hold([slot]))

    async def release_slot(self, slot: Slot) -> None:
        await self.call("EVAL", _RELEASE, 1, slot_key(self._run_id, slot), self._name)

    async def _hold(self, slots: Sequence[Slot]) -> int:
        keys = [slot_key(self._run_id, slot) for slot in slots]
        held = await self.call("EVAL", _SLOT, len(keys), *keys, self._name, int(SLOT_S * 1000))
        return int(held)

    async def others(self) -> list[ServerStatus]:
        """The other servers of the run; none if Redis does not answer."""
        try:
            found = _statuses(await self.attempt("EVAL", *_servers_of(self._run_id)))
        except FAILURES as error:
            self.note_absence(error)
            return []
        return [server for server in found if server.name != self._name]

    async def report(self, status: ServerStatus) -> None:
        """Replace the status. Never raises."""
        key = server_key(self._run_id, self._name)
        try:
            fields, milliseconds = words(status.on_the_wire()), int(GONE_AFTER_S * 1000)
            await self.attempt(
                *("EVAL", _REPORT, 2, key, servers_key(self._run_id)),
                *(self._name, milliseconds, *fields),
            )
        except FAILURES as error:
            self.note_absence(error)

    async def leave(self) -> None:
        """Remove the status and the name, so that nobody waits for this server or misses it. Never
        raises."""
        try:
            await self.attempt("SREM", servers_key(self._run_id), self._name)
            await self.attempt("DEL", server_key(self._run_id, self._name))
        except FAILURES as error:
            self.note_absence(error)
