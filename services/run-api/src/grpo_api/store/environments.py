"""Environments: who has registered, who is here, and what the queue looks like to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from grpo_api.errors import unprocessable
from grpo_api.planning.quotas import why_unservable
from grpo_api.planning.run_view import Environment, Fill, RunCounters, RunView
from grpo_api.store.keys import RECEIPT_S, keys, parse_kind, receipt_key
from grpo_api.store.records import RegisteredEnvironment
from grpo_api.store.redis import RedisLink
from grpo_core.wire.run_api import EnvironmentRegistration, Registration

_NOBODY = ""


class EnvironmentStore:
    def __init__(self, link: RedisLink, timeout_s: float) -> None:
        self._link = link
        self._timeout_ms = timeout_s * 1000

    async def register(
        self, registration: EnvironmentRegistration, key: str | None = None
    ) -> RegisteredEnvironment | None:
        """None until a trainer has registered and polled once.

        Args:
            key: the caller's name for this call: repeated, it gives the same environment.
        Raises:
            Refused: 422, the group size does not divide the batch.
        """
        outcome, *rest = await self._link.script(
            "register_environment",
            keys(
                self._link,
                *("trainer", "environments", "environment_names", "name_counts", "connected"),
                *("seen", "group_sizes", "resets", receipt_key(key and f"environment {key}")),
            ),
            registration.model_dump_json(),
            registration.desired_name,
            registration.group_size,
            RECEIPT_S,
        )
        if outcome == b"wait":
            return None
        if outcome == b"unservable":
            reason = why_unservable(registration.group_size, batch_size=rest[0])
            raise unprocessable(["group_size"], str(reason))
        env_id, name, step, trainer = rest
        return RegisteredEnvironment(
            env_id, name.decode(), step, Registration.model_validate_json(trainer)
        )

    async def disconnect(self, env_id: int) -> int | None:
        """Returns how many buffered parts were dropped; None where no such environment is known.

        Nobody is left to complete the parts, so they could never be served.
        """
        dropped: int | None = await self._link.script(
            "disconnect_environment",
            keys(self._link, "environments", "connected", "buffers", "payloads", "totals", "large"),
            env_id,
        )
        return dropped

    async def poll(self, env_id: int) -> RunView:
        """`view`, noting that this environment is here."""
        return await self._view(str(env_id))

    async def view(self) -> RunView:
        """One consistent view, at a cost that does not grow with the queue."""
        return await self._view(_NOBODY)

    async def _view(self, polling: str) -> RunView:
        answer = await self._link.script(
            "view_run",
            keys(
                self._link,
                *("trainer", "environments", "environment_names", "connected", "seen"),
                *("queued_kinds", "queued_sizes", "totals"),
            ),
            polling,
        )
        found = _Answer(*answer)
        counters = RunCounters(
            current_step=int(found.trainer[0] or 0),
            batch_size=int(found.trainer[1] or 0),
            queued={parse_kind(kind): int(n) for kind, n in _pairs(found.kinds).items()},
            max_group_size=max(map(int, found.sizes), default=1),
            fill=_fill(*found.totals),
            num_steps=None if found.trainer[2] is None else int(found.trainer[2]),
        )
        return RunView(self._environments(found), counters)

    def _environments(self, found: _Answer) -> list[Environment]:
        names, seen = _pairs(found.names), _pairs(found.seen)
        here = {
            env_id
            for env_id in found.connected
            if int(found.now_ms) - int(seen[env_id]) <= self._timeout_ms
        }
        environments = [
            Environment(
                env_id=int(env_id),
                name=names[env_id].decode(),
                connected=env_id in here,
                registration=_registration(registration),
            )
            for env_id, registration in _pairs(found.registrations).items()
        ]
        return sorted(environments, key=lambda environment: environment.env_id)


@lru_cache(maxsize=4096)
def _registration(written: bytes) -> EnvironmentRegistration:
    """Read with every poll, of everybody who ever registered."""
    return EnvironmentRegistration.model_validate_json(written)


@dataclass(frozen=True)
class _Answer:
    """What `view_run` returns, in its order; hashes are flat."""

    now_ms: bytes
    trainer: Sequence[bytes | None]
    registrations: Sequence[bytes]
    names: Sequence[bytes]
    connected: Sequence[bytes]
    seen: Sequence[bytes]
    kinds: Sequence[bytes]
    sizes: Sequence[bytes]
    totals: Sequence[bytes | None]


def _fill(groups: bytes | None, queued: bytes | None, buffered: bytes | None) -> Fill:
    return Fill(groups=int(groups or 0), stored_bytes=int(queued or 0) + int(buffered or 0))


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
