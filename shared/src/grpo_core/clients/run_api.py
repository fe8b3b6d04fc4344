"""Clients of run-api: one for trainers (blocking), one for environments (async)."""

from __future__ import annotations

import gzip
import time
import uuid
from collections.abc import Callable
from typing import Any

from grpo_core.clients.run_api_answers import (
    SERVICE,
    LeasedBatch,
    json_object,
    leased_batch,
    named_refusal,
    parse,
)
from grpo_core.clients.service import AsyncServiceClient, ServiceClient
from grpo_core.deadline import Deadline
from grpo_core.errors import RequestRefused, ServiceUnavailable
from grpo_core.wire.run_api import (
    EnvironmentCount,
    EnvironmentRegistration,
    EnvironmentStatus,
    Registration,
    RunStatus,
    TrainerEnrolled,
    TrainerInfo,
)
from grpo_core.wire.scored_group import ScoredGroup

__all__ = ["SERVICE", "EnvironmentClient", "LeasedBatch", "TrainerClient"]

HINT = "start run-api, or check --run-api-url"
GZIP_FROM_BYTES = 1024
BATCH_WAIT_S = 1.0
"""One request for a batch waits so long at run-api. What the trainer does between two of them, such
as noticing that the inference server is gone, can wait as long."""
SUBMISSION_DEADLINE_S = 480.0
"""run-api knows a submission again for 600 s: within that a repeat is not another group. What is
left of them covers the pause before the last repeat and its way."""
_REQUEST_TIMEOUT_S = 60.0
"""Longer than run-api holds a request for a batch, or a group while its queue is full (20 s)."""
_POLL_S = 0.05


class TrainerClient(ServiceClient):
    """What a trainer asks of run-api. Every call may be repeated without harm, and is.

    Args:
        base_url: for example http://127.0.0.1:8000
        deadline_s: how long one call may keep trying before `ServiceUnavailable`.
        token: where run-api asks for one (RUN_API_TOKEN).
    """

    def __init__(self, base_url: str, deadline_s: float = 60.0, token: str | None = None) -> None:
        super().__init__(SERVICE, base_url, deadline_s, _REQUEST_TIMEOUT_S, token, HINT)
        self._enrolled: TrainerEnrolled | None = None
        self._last_batch = 0

    @property
    def run_uuid(self) -> str:
        """Of the run that this trainer registered with."""
        assert self._enrolled is not None, "register() comes first"
        return self._enrolled.run_uuid

    def register(self, registration: Registration) -> int:
        """Announce the run; returns the trainer's id. Batches that no trainer has acknowledged are
        handed out from now on, in order, as long as `resume_after` says nothing else.

        Raises:
            ServiceUnavailable: run-api did not answer in time.
            RequestRefused: the registration conflicts with the run in progress.
        """
        answer = self._request("POST", "/register", json=registration.model_dump())
        self._enrolled, self._last_batch = parse(TrainerEnrolled, answer), 0
        return self._enrolled.uuid

    def status(self) -> RunStatus:
        return parse(RunStatus, self._request("GET", "/status"))

    def resume_after(self, batch_id: int) -> None:
        """After `register`: everything up to this batch is in the trainer's state."""
        self._last_batch = batch_id

    def next_batch(
        self,
        deadline_s: float,
        meanwhile: Callable[[], None] = lambda: None,
        batches_left: int | None = None,
        look: Callable[[EnvironmentCount], None] = lambda _: None,
    ) -> LeasedBatch:
        """Wait for the batch after the last one.

        Args:
            meanwhile: called every second while there is none; the time that it takes does not
                count
            batches_left: how many the run needs, with this one; environments leave after the last
            look: told how many environments there are, every second while there is none

        Raises:
            ServiceUnavailable: no batch was complete within `deadline_s` seconds.
            TrainerSuperseded: another trainer has registered.
            LeasesFull: acknowledge first; the next call goes on.
            UnknownBatch: the batch given to `resume_after` is not one of this run.
            ProtocolViolation: run-api answered that no trainer is registered, or a broken batch.
        """
        deadline = Deadline(deadline_s)
        while True:
            found = self._lease(min(BATCH_WAIT_S, deadline.left_s), batches_left)
            if isinstance(found, LeasedBatch):
                self._last_batch = found.id
                return found
            look(found)
            if deadline.has_passed:
                raise ServiceUnavailable(
                    f"{SERVICE}: no batch within {deadline_s:g} s; are environments running and "
                    f"sending groups? Look at {self.base_url}/status and at their logs"
                )
            # What it waits for, such as a server that restarts, keeps environments waiting too.
            with deadline.suspended():
                meanwhile()
            time.sleep(_POLL_S)  # run-api answers early while it shuts down

    def acknowledge(self, batch_id: int) -> None:
        """Every batch up to this one is in a durable state: it is never handed out again.

        Raises:
            ServiceUnavailable: run-api did not answer in time. Saying it again later is harmless.
            TrainerSuperseded: another trainer has registered.
            UnknownBatch: no such batch was handed out in this run.
        """
        self._asked_by_trainer("POST", f"/batch/{batch_id}/ack")

    def _lease(self, wait_s: float, batches_left: int | None) -> LeasedBatch | EnvironmentCount:
        query = {"after": self._last_batch, "wait_s": round(wait_s, 3)}
        if batches_left is not None:
            query["batches_left"] = batches_left
        answer = self._asked_by_trainer("GET", "/batch", **query)
        return leased_batch(answer, self._last_batch)

    def _asked_by_trainer(self, method: str, path: str, **query: float) -> dict[str, Any]:
        assert self._enrolled is not None, "register() comes first"
        try:
            return self._request(method, path, params={"trainer": self._enrolled.uuid, **query})
        except RequestRefused as error:
            raise named_refusal(error) from error

    def _request(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        return json_object(self.send(method, path, **request))


class EnvironmentClient(AsyncServiceClient):
    """What an environment asks of run-api."""

    def __init__(self, base_url: str, deadline_s: float = 60.0, token: str | None = None) -> None:
        super().__init__(SERVICE, base_url, deadline_s, _REQUEST_TIMEOUT_S, token=token, hint=HINT)

    async def info(self) -> TrainerInfo:
        return parse(TrainerInfo, await self._request("GET", "/info"))

    async def register(self, registration: EnvironmentRegistration) -> dict[str, Any] | None:
        """Announce the environment; None while run-api waits for a trainer to start. Under a key of
        its own: an answer that is lost must not leave a second one behind, whose minimum allocation
        nobody fills."""
        answer = await self._request(
            "POST",
            "/register-env",
            json=registration.model_dump(),
            headers={"idempotency-key": str(uuid.uuid4())},
        )
        return answer if answer["status"] == "success" else None

    async def status(self, env_id: int) -> EnvironmentStatus:
        answer = await self._request("GET", "/status-env", json={"env_id": env_id})
        return parse(EnvironmentStatus, answer)

    async def submit(self, group: ScoredGroup) -> dict[str, Any]:
        """Send one scored group, gzip-encoded when it is large. Under a key of its own, so that it
        is queued once however often it is sent: where the queue is full, or an answer was lost.

        Raises:
            RequestRefused: the group breaks the contract; sending it again is useless.
            ServiceUnavailable: not known to have arrived within the deadline.
        """
        body = group.model_dump_json().encode()
        headers = {"content-type": "application/json", "idempotency-key": str(uuid.uuid4())}
        if len(body) >= GZIP_FROM_BYTES:
            body = gzip.compress(body, compresslevel=1)
            headers["content-encoding"] = "gzip"
        deadline_s = min(self._deadline_s, SUBMISSION_DEADLINE_S)
        return await self._request(
            "POST", "/scored_data", content=body, headers=headers, deadline_s=deadline_s
        )

    async def disconnect(self, env_id: int) -> None:
        await self._request("POST", "/disconnect-env", json={"env_id": env_id})

    async def _request(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        return json_object(await self.send(method, path, **request))
