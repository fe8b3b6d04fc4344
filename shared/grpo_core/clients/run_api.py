"""Clients of run-api: a blocking one for trainers, an async one for environments."""

from __future__ import annotations

import gzip
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from grpo_core.clients.service import AsyncServiceClient, ServiceClient
from grpo_core.errors import (
    GrpoError,
    LeasesFull,
    ProtocolViolation,
    RequestRefused,
    TrainerSuperseded,
    UnknownBatch,
    parsing,
    problems_of,
)
from grpo_core.wire.fields import WireModel
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import (
    ITEM_POSITIONS_HEADER,
    RUN_UUID_HEADER,
    EnvironmentCount,
    EnvironmentRegistration,
    EnvironmentStatus,
    Registration,
    RunStatus,
    TrainerEnrolled,
    TrainerInfo,
    WandbNames,
)
from grpo_core.wire.scored_group import ScoredGroup

SERVICE = "Atropos API"
"""The name in messages, because users search for "Atropos API not reachable"."""

REFUSED_GROUPS_HINT = "correct the environment: run-api refuses its groups"

M = TypeVar("M", bound=WireModel)


@dataclass(frozen=True)
class LeasedBatch:
    """A batch that is leased to this trainer. Ids of a run count from 1.

    `received_under`: for each group, the policy version that was served when run-api received it.
    These weights or older ones sampled the group. None if the version was unknown.

    Example: `LeasedBatch(5, [a, b], [PolicyVersion(1, 7), None])`.
    """

    id: int
    groups: list[ScoredGroup]
    received_under: list[PolicyVersion | None]

    def __post_init__(self) -> None:
        if (found := len(self.received_under)) != len(self.groups):
            raise ValueError(f"received_under has {found} entries for {len(self.groups)} groups")


_LEASED = TypeAdapter(LeasedBatch)
_NAMED_REFUSALS: Mapping[str, type[RequestRefused]] = {
    "leases_full": LeasesFull,
    "trainer_superseded": TrainerSuperseded,
    "batch_unknown": UnknownBatch,
}
"""By the type of a problem in the answer, because several of them share a status."""

HINT = "start run-api, or check --run-api-url"
GZIP_FROM_BYTES = 1024
BATCH_WAIT_S = 1.0
"""How long run-api may hold one request for a batch. Between two of them the trainer does other
checks, such as whether the inference server still runs."""
SUBMISSION_DEADLINE_S = 480.0
"""run-api recognises a repeated submission for 600 s. This is shorter, because the last repeat may
start late and take long."""
_REQUEST_TIMEOUT_S = 60.0
"""Longer than run-api delays an answer, which is up to 20 s while its queue is full."""
_POLL_S = 0.05
_AHEAD_ENDS_WITHIN_S = 2.0


class TrainerClient(ServiceClient):
    """A trainer's client of run-api. It retries every call, because repeats are harmless.

    Args:
        base_url: for example http://127.0.0.1:8000
        deadline_s: how long one call may retry before `ServiceUnavailable`.
        token: if run-api needs one (RUN_API_TOKEN).
    """

    def __init__(self, base_url: str, deadline_s: float = 60.0, token: str | None = None) -> None:
        super().__init__(SERVICE, base_url, deadline_s, _REQUEST_TIMEOUT_S, token, HINT)
        self._enrolled: TrainerEnrolled | None = None
        self._last_batch = 0
        self._ahead: _LeaseAhead | None = None  # requests the batch that `poll` returns next

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.end(within_s=_AHEAD_ENDS_WITHIN_S)
        super().close()

    @property
    def run_uuid(self) -> str:
        """The run with which this trainer registered."""
        assert self._enrolled is not None, "call register() first"
        return self._enrolled.run_uuid

    def register(self, registration: Registration) -> int:
        """Register the trainer; returns its id.

        Batches that no trainer has acknowledged follow in order, unless `resume_after` skips them.

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
        """After `register`: skip batches up to this one, which the checkpoint includes."""
        self._last_batch = batch_id

    def poll(
        self, wait_s: float = BATCH_WAIT_S, batches_left: int | None = None
    ) -> LeasedBatch | EnvironmentCount:
        """The batch after the last one, or the number of environments if there is none yet.

        Args:
            wait_s: how long run-api may hold the request
            batches_left: number of batches that the run still needs, with this one; environments
                exit after the last

        Raises:
            ServiceUnavailable: run-api did not answer in time.
            TrainerSuperseded: another trainer has registered.
            LeasesFull: acknowledge batches, then call again.
            UnknownBatch: the run never handed out the batch given to `resume_after`.
            ProtocolViolation: run-api has no registered trainer, or sent an invalid batch.
        """
        ahead, self._ahead = self._ahead, None
        found = (ahead and ahead.end()) or self._lease(wait_s, batches_left)
        if isinstance(found, LeasedBatch):
            self._last_batch = found.id
        return found

    def request_ahead(
        self, batches_left: int, prepare: Callable[[LeasedBatch], None] = lambda _: None
    ) -> None:
        """Request the next batch in a thread, for the next call of `poll`.

        Args:
            batches_left: number of batches that the run still needs, with this one
            prepare: called in the thread with the batch that `poll` will return
        """
        # One attempt: `poll` retries.
        self._ahead = _LeaseAhead(
            lambda: self._lease(BATCH_WAIT_S, batches_left, deadline_s=0.1), prepare
        )

    def acknowledge(self, batch_id: int) -> None:
        """Acknowledge every batch up to this one, which the checkpoint includes.

        Raises:
            ServiceUnavailable: run-api did not answer in time. A later repeat is harmless.
            TrainerSuperseded: another trainer has registered.
            UnknownBatch: the run never handed out this batch.
        """
        self._asked_by_trainer("POST", f"/batch/{batch_id}/ack")

    def _lease(
        self, wait_s: float, batches_left: int | None, deadline_s: float | None = None
    ) -> LeasedBatch | EnvironmentCount:
        query = {"after": self._last_batch, "wait_s": round(wait_s, 3)}
        if batches_left is not None:
            query["batches_left"] = batches_left
        answer = self._asked_by_trainer("GET", "/batch", deadline_s, **query)
        found = leased_batch(answer, self._last_batch)
        if not isinstance(found, LeasedBatch):
            time.sleep(_POLL_S)  # run-api answers early while it shuts down
        return found

    def _asked_by_trainer(
        self, method: str, path: str, deadline_s: float | None = None, **query: float
    ) -> dict[str, Any]:
        assert self._enrolled is not None, "call register() first"
        params = {"trainer": self._enrolled.uuid, **query}
        try:
            return self._request(method, path, params=params, deadline_s=deadline_s)
        except RequestRefused as error:
            raise _named(error) from error

    def _request(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        return _json_object(self.send(method, path, **request))


class _LeaseAhead:
    """Requests one batch in a thread, until there is one. Errors are left to the next request.

    Args:
        lease: waits for a batch, for about a second
        prepare: called with the batch
    """

    def __init__(
        self,
        lease: Callable[[], LeasedBatch | EnvironmentCount],
        prepare: Callable[[LeasedBatch], None],
    ) -> None:
        self._lease = lease
        self._prepare = prepare
        self._found: LeasedBatch | None = None
        self._is_wanted = True
        self._thread = threading.Thread(target=self._run, name="lease-ahead", daemon=True)
        self._thread.start()

    def end(self, within_s: float | None = None) -> LeasedBatch | None:
        """Wait for the request or the preparation in progress. Returns the batch, or None if there
        is none."""
        self._is_wanted = False
        self._thread.join(within_s)
        return self._found

    def _run(self) -> None:
        while self._is_wanted and self._found is None:
            try:
                found = self._lease()
            except GrpoError:
                return
            if isinstance(found, LeasedBatch):
                self._found = found
                self._prepare(found)


class EnvironmentClient(AsyncServiceClient):
    """An environment's client of run-api."""

    def __init__(self, base_url: str, deadline_s: float = 60.0, token: str | None = None) -> None:
        super().__init__(SERVICE, base_url, deadline_s, _REQUEST_TIMEOUT_S, token=token, hint=HINT)

    async def info(self) -> TrainerInfo:
        return parse(TrainerInfo, await self._request("GET", "/info"))

    async def register(self, registration: EnvironmentRegistration) -> dict[str, Any] | None:
        """Register the environment; None while no trainer has started.

        The idempotency key prevents a second registration if an answer is lost. No process would
        ever fill the minimum allocation of that one.
        """
        answer = await self._request(
            "POST",
            "/register-env",
            json=registration.model_dump(),
            headers={"idempotency-key": str(uuid.uuid4())},
        )
        return answer if answer["status"] == "success" else None

    async def wandb_names(self) -> WandbNames:
        return parse(WandbNames, await self._request("GET", "/wandb_info"))

    async def status(self, env_id: int) -> EnvironmentStatus:
        answer = await self._request("GET", "/status-env", json={"env_id": env_id})
        return parse(EnvironmentStatus, answer)

    async def submit(
        self, group: ScoredGroup, run_uuid: str, item_positions: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Submit one scored group, gzip-encoded if it is large.

        Args:
            run_uuid: the run in which its sampling began; run-api refuses groups of another one
            item_positions: which items the sender has used, as `ITEM_POSITIONS_HEADER`

        The request is retried if the queue is full or an answer is lost. With its idempotency key,
        run-api queues the group once.

        Raises:
            RequestRefused: the group is invalid, or of another run; a retry is useless.
            ServiceUnavailable: run-api did not confirm the group within the deadline.
        """
        body = group.model_dump_json().encode()
        headers = {
            "content-type": "application/json",
            "idempotency-key": str(uuid.uuid4()),
            RUN_UUID_HEADER: run_uuid,
        }
        if item_positions:
            headers[ITEM_POSITIONS_HEADER] = json.dumps(item_positions)
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
        return _json_object(await self.send(method, path, **request))


def _json_object(response: httpx.Response) -> dict[str, Any]:
    """The answer as a JSON object. Raises `ProtocolViolation` if it is not one."""
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        return answer
    url = response.request.url
    raise ProtocolViolation(f"{SERVICE}: {url} answered no JSON object; check the URL of run-api")


def parse(model: type[M], answer: dict[str, Any] | None) -> M:
    """Raises `ProtocolViolation` if the answer is not a valid record."""
    with parsing(f"{SERVICE} sent an invalid answer"):
        return model.model_validate(answer)


def _named(error: RequestRefused) -> RequestRefused:
    """The refusal as a subclass, if a trainer reacts to it; else unchanged."""
    kind = next((kind for name, kind in _NAMED_REFUSALS.items() if name in error.kinds), None)
    if kind is None:
        return error
    more = (
        ". The newer trainer gets the batches that the checkpoint of this trainer does not include"
        if kind is TrainerSuperseded
        else ""
    )
    return kind(f"{error}{more}", error.status, error.kinds)


def named_refusals(environments: EnvironmentCount) -> str:
    """The end of an error that names the lack of a batch; "" if run-api refused no group."""
    if not environments.refused_groups:
        return ""
    return (
        f". Refused groups since this trainer registered: {environments.refused_groups}; the last "
        f"reason: {environments.last_refusal}; {REFUSED_GROUPS_HINT}"
    )


def leased_batch(answer: dict[str, Any], after: int) -> LeasedBatch | EnvironmentCount:
    """Parse the answer of `GET /batch?after=`; the number of environments if there is no batch.

    Raises:
        ProtocolViolation: no trainer is registered, or the batch is invalid or not a later one.
    """
    if answer.get("status") == "error":
        raise ProtocolViolation(
            f"{SERVICE}: {answer.get('message')} The registration of this trainer is lost: "
            "someone called /reset_data, or Redis lost its data and needs --appendonly yes"
        )
    if answer["batch"] is None:
        return parse(EnvironmentCount, answer.get("environments"))
    number, versions = answer.get("batch_id"), answer.get("received_under")
    if not isinstance(number, int) or number <= after:
        raise ProtocolViolation(
            f"{SERVICE}: expected a batch after {after}, got {number}; check the URL of run-api"
        )
    try:
        return _LEASED.validate_python(
            {"id": number, "groups": answer["batch"], "received_under": versions}
        )
    except ValidationError as error:
        raise ProtocolViolation(
            f"{SERVICE}: batch {number} is invalid: {problems_of(error)}; use the same release of "
            "run-api and of the trainer"
        ) from error
