"""The processes of the soak: Redis, two run-api on it, eight environments, a trainer."""

from __future__ import annotations

import sys
import time
import uuid
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from grpo_core.wire import ServerStatus
from grpo_local.ports import free_port
from grpo_local.redis_server import answers_ping, bundled_redis, redis_command
from tests.soak.evidence import LINE, journal_path
from tests.soak.faults import ENVIRONMENTS, FIRST_API, REDIS, SECOND_API, TRAINER
from tests.soak.journal import writer_of
from tests.soak.redis_facts import AofState, aof_state
from tests.soak.supervisor import Supervisor

APIS = (FIRST_API, SECOND_API)
BATCH_SIZE = 16
GROUP_SIZES = (4, 4, 4, 4, 2, 2, 8, 8)
"""Of the environments. All divide the batch, so that what is left can be filled up."""
MINIMUM = 0.125
"""The share of every batch that the first environment claims."""
COUNTS = (
    *("queued_groups", "queued_sequences", "queued_bytes"),
    *("leased_batches", "leased_bytes"),
)
"""In run-api's metrics, 0 where everything was trained and acknowledged."""
CALL_DEADLINE_S = 180.0
START_DEADLINE_S = 300.0
QUIET_DEADLINE_S = 60.0
"""Of what is asked while nothing is hit."""
_LOOK_S = 1.0
_REDIS_DEADLINE_S = 5.0
_ENVIRONMENT_TIMEOUT_S = 10.0
"""Less than a wait may last: a member whose process was killed while it registered is nobody's, and
batches wait for its minimum so long."""
_REWRITE_FROM_BYTES, _REWRITE_AT_GROWTH_PERCENT = 256 * 1024, 20
"""Low, so that Redis rewrites its file often, and is killed while it does."""


@dataclass(frozen=True)
class Settings:
    """Args: appendfsync: always, everysec or no."""

    directory: Path
    seconds: float
    seed: int
    appendfsync: str


class Cluster:
    """Builds the command lines, and looks at what they started."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis_port, *self._api_ports = (free_port() for _ in (REDIS, *APIS))
        self.urls = [f"http://127.0.0.1:{port}" for port in self._api_ports]
        self._trainer_urls = cycle(self.urls)
        self.aof_states: list[AofState] = []
        (settings.directory / REDIS).mkdir(parents=True)
        self.supervisor = Supervisor(settings.directory / "logs", self.takes_signals, self._look_at)
        self._http = httpx.Client(timeout=QUIET_DEADLINE_S)

    @property
    def directory(self) -> Path:
        return self._settings.directory

    def start(self) -> bool:
        """False where something did not become ready, or ended."""
        start = self.supervisor.start
        start(REDIS, self._redis)
        for name, port in zip(APIS, self._api_ports, strict=True):
            start(name, partial(self._run_api, port))
        ready = self.supervisor.run_until(self._all_answer, START_DEADLINE_S)
        start(TRAINER, self._trainer)
        for number, name in enumerate(ENVIRONMENTS):
            start(name, partial(self._environment, number))
        return ready

    def close(self) -> None:
        self.supervisor.close()
        self._http.close()

    def status(self) -> ServerStatus | None:
        """None where no run-api answers at this moment."""
        for url in self.urls:
            try:
                answer = self._http.get(f"{url}/status")
            except httpx.TransportError:
                continue
            if answer.is_success:
                return ServerStatus.model_validate_json(answer.content)
        return None

    def counts(self) -> dict[str, float]:
        """What run-api says it holds for the trainer, once Redis has told it.

        Raises:
            httpx.HTTPError: it does not answer
            KeyError: Redis does not answer it
        """
        give_up_at = time.monotonic() + QUIET_DEADLINE_S
        while True:
            text = self._http.get(f"{self.urls[0]}/metrics").raise_for_status().text
            samples = {
                family.name.removeprefix("run_api_"): family.samples[0].value
                for family in text_string_to_metric_families(text)
                if family.samples
            }
            if samples.keys() >= set(COUNTS) or time.monotonic() > give_up_at:
                return {name: samples[name] for name in COUNTS}
            time.sleep(_LOOK_S)

    def takes_signals(self, name: str) -> bool:
        """Whether this process has come so far that SIGTERM ends it in order."""
        if name == REDIS:
            return aof_state(self._redis_port) is not None
        if name in APIS:
            return self._is_serving(self.urls[APIS.index(name)])
        return writer_of(journal_path(self.directory, name)) == self.supervisor.pid(name)

    def _is_serving(self, url: str) -> bool:
        try:
            return self._http.get(f"{url}/healthz", timeout=_LOOK_S).is_success
        except httpx.TransportError:
            return False

    def post(self, path: str, body: bytes) -> None:
        """While nothing is hit, but a disk may be slow. Raises `httpx.HTTPError` where it is not
        answered 2xx."""
        key = {"Idempotency-Key": uuid.uuid4().hex}
        give_up_at = time.monotonic() + QUIET_DEADLINE_S
        while True:
            answer = self._http.post(f"{self.urls[0]}{path}", content=body, headers=key)
            if (
                answer.status_code != httpx.codes.SERVICE_UNAVAILABLE
                or time.monotonic() > give_up_at
            ):
                answer.raise_for_status()
                return
            time.sleep(_LOOK_S)

    def _all_answer(self) -> bool:
        if not answers_ping(self._redis_port):
            return False
        try:
            return all(self._http.get(f"{url}/health").is_success for url in self.urls)
        except httpx.TransportError:
            return False

    def _look_at(self, victim: str) -> None:
        state = aof_state(self._redis_port) if victim == REDIS else None
        if state is not None:
            self.aof_states.append(state)

    def _redis(self) -> list[str]:
        return [
            *redis_command(self._redis_port, self.directory / REDIS, bundled_redis()),
            *("--appendfsync", self._settings.appendfsync),
            *("--auto-aof-rewrite-min-size", str(_REWRITE_FROM_BYTES)),
            *("--auto-aof-rewrite-percentage", str(_REWRITE_AT_GROWTH_PERCENT)),
        ]

    def _run_api(self, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "grpo_api"),
            *("--port", str(port)),
            *("--redis-url", f"redis://127.0.0.1:{self._redis_port}/0"),
            *("--redis-deadline-s", str(_REDIS_DEADLINE_S)),
            *("--environment-timeout-s", str(_ENVIRONMENT_TIMEOUT_S)),
            *("--run-id", "soak"),
        ]

    def _trainer(self) -> list[str]:
        """Each life asks another replica."""
        return [
            *(sys.executable, "-m", "tests.soak.trainer"),
            *("--url", next(self._trainer_urls)),
            *("--journal", str(journal_path(self.directory, TRAINER))),
            *("--line", str(self.directory / LINE)),
            *("--batch-size", str(BATCH_SIZE)),
            *("--deadline-s", str(CALL_DEADLINE_S)),
            *("--seed", str(self._settings.seed)),
        ]

    def _environment(self, number: int) -> list[str]:
        """Half of them have the one replica, half the other."""
        own, other = self.urls if number % 2 else self.urls[::-1]
        return [
            *(sys.executable, "-m", "tests.soak.environment"),
            *("--number", str(number)),
            *("--url", own),
            *("--other-url", other),
            *("--journal", str(journal_path(self.directory, ENVIRONMENTS[number]))),
            *("--group-size", str(GROUP_SIZES[number])),
            *("--minimum", str(0.0 if number else MINIMUM)),
            *("--seed", str(self._settings.seed)),
            *("--deadline-s", str(CALL_DEADLINE_S)),
        ]
