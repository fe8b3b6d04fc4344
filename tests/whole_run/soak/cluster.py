"""Runs the processes of the soak: Redis, two run-api processes, four environments, a trainer.

A process that was hit is started again. A process that ends for another reason ends the soak.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import httpx
import redis
import structlog
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from grpo_core.closing import ClosesOnExit
from grpo_core.process import ManagedProcess, describe_exit
from grpo_core.redis.server import answers_ping, bundled_redis, redis_command
from grpo_core.wire.run_api import RunStatus
from grpo_runs.process.ports import free_port
from tests.fixtures.health import is_healthy
from tests.support.wait import wait_for
from tests.whole_run.soak import environment, trainer
from tests.whole_run.soak.hits import APIS, ENVIRONMENTS, REDIS, TRAINER, Hit, Moment
from tests.whole_run.soak.journal import Records, Started, journal_path

BATCH_SIZE = 16
GROUP_SIZES = (4, 4, 2, 8)
"""Group sizes of the environments. All divide the batch, so the last batch can be filled."""
MINIMUM = 0.125
"""The first environment's minimum share of every batch."""
COUNTS = ("queued_groups", "queued_sequences", "queued_bytes", "leased_batches", "leased_bytes")
"""Metrics of run-api that are 0 when every group is trained and acknowledged."""
_LONG_SOAK_S = 300.0
_REDIS_DEADLINE_S = 5.0
_ENVIRONMENT_TIMEOUT_S = 10.0
"""Short, because an environment that was killed during its registration stays registered. Batches
wait for its minimum until this time has passed."""
_REWRITE_FROM_BYTES, _REWRITE_AT_GROWTH_PERCENT = 256 * 1024, 20
"""Small, so that Redis often rewrites its append-only file."""
_LOG_LINES = 15

log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Options of the soak. `appendfsync`: always, everysec or no."""

    directory: Path
    seconds: float
    seed: int
    appendfsync: str

    @property
    def call_deadline_s(self) -> float:
        """Deadline of every call, with its retries. A short soak runs beside other tests, on a
        machine that may be busy."""
        return 45.0 if self.seconds >= _LONG_SOAK_S else 120.0


class Incident(AssertionError):
    """A process ended without a hit, or in another way than its hit demands."""


class _Member:
    """`command`: starts the next process."""

    def __init__(self, name: str, command: Callable[[], Sequence[str]], log_path: Path) -> None:
        self._name = name
        self._command = command
        self._log_path = log_path
        self._start()

    def _start(self) -> None:
        variables = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self.process = ManagedProcess(self._name, self._command(), self._log_path, variables)
        self.must_end = False
        self._exit_code = 0
        self._down_s: float | None = None
        self._ended_at: float | None = None

    def expect_end(self, exit_code: int, down_s: float | None) -> None:
        """`down_s`: time until the next start; None for no restart."""
        self.must_end, self._exit_code, self._down_s = True, exit_code, down_s

    def tend(self) -> None:
        """Raises `Incident` if the process ended unexpectedly."""
        code = self.process.exit_code
        if code is None:
            return
        if not self.must_end or code != self._exit_code:
            tail = self.process.log_tail(_LOG_LINES)
            raise Incident(f"{self._name} ended with {describe_exit(code)}; its log ends:\n{tail}")
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        if self._down_s is not None and now >= self._ended_at + self._down_s:
            self.process.kill()  # reaps the process
            self._start()


class Cluster(ClosesOnExit):
    """Starts and hits the processes. `hits`: number of hits by kind."""

    def __init__(self, settings: Settings, records: Records) -> None:
        self._settings = settings
        self._records = records
        self.directory = settings.directory
        self._redis_port, *api_ports = (free_port() for _ in (REDIS, *APIS))
        self._urls = {
            name: f"http://127.0.0.1:{port}" for name, port in zip(APIS, api_ports, strict=True)
        }
        self._trainer_urls = cycle(self._urls.values())
        self._members: dict[str, _Member] = {}
        self.hits: Counter[str] = Counter()
        (self.directory / REDIS).mkdir(parents=True)

    @property
    def url(self) -> str:
        return self._urls[APIS[0]]

    def start(self) -> None:
        self._add(REDIS, self._redis)
        for name in APIS:
            self._add(name, partial(self._run_api, name))
        self.wait_until(lambda: all(map(self._takes_signals, (REDIS, *APIS))))
        self._add(TRAINER, self._trainer)
        for number, name in enumerate(ENVIRONMENTS):
            self._add(name, partial(self._environment, number))

    def close(self) -> None:
        for member in self._members.values():
            member.process.kill()

    def wait_until(self, read: Callable[[], T]) -> T:
        """Restart processes until `read` returns a true value; returns that value.

        Raises:
            AssertionError: an `Incident`, or the deadline passed.
        """

        def look() -> T:
            for member in self._members.values():
                member.tend()
            return read()

        return wait_for(look)

    def all_up(self) -> bool:
        return all(map(self._takes_signals, self._members))

    def hit(self, hit: Hit, down_s: float) -> None:
        """Hit all victims when they are ready: only then they exit cleanly on SIGTERM."""
        self.wait_until(lambda: all(map(self._takes_signals, hit.victims)))
        log.info("process.hit", kind=hit.kind, victims=hit.victims, down_s=round(down_s, 2))
        exit_code = -signal.SIGKILL if hit.signal == signal.SIGKILL else 0
        for name in hit.victims:
            self._members[name].expect_end(exit_code, down_s)
        if hit.moment in (Moment.TRAINING, Moment.SAVED):
            (self.directory / trainer.DIE_AT).write_text(hit.moment)  # the trainer kills itself
        else:
            if hit.moment == Moment.REWRITING:
                with redis.Redis(port=self._redis_port) as client, suppress(redis.ResponseError):
                    client.bgrewriteaof()  # Redis rejects this during a rewrite
            for name in hit.victims:
                self._members[name].process.signal(hit.signal)
        self.hits[hit.kind] += 1

    def end(self, names: Sequence[str]) -> None:
        """Send SIGTERM, without a restart."""
        members = [self._members[name] for name in names]
        for member in members:
            member.expect_end(0, down_s=None)
            member.process.signal(signal.SIGTERM)
        self.wait_until(lambda: all(member.process.exit_code is not None for member in members))

    def status(self) -> RunStatus:
        return RunStatus.model_validate_json(self._ask("/status").content)

    def _ask(self, path: str) -> httpx.Response:
        """Repeat while run-api answers 503 because Redis is suspended."""
        answer = wait_for(lambda: httpx.get(f"{self.url}{path}"), lambda a: a.status_code != 503)
        return answer.raise_for_status()

    def counts(self) -> dict[str, float]:
        """The groups that run-api still holds for the trainer."""

        def samples() -> dict[str, float]:
            text = self._ask("/metrics").text
            return {
                family.name.removeprefix("run_api_"): family.samples[0].value
                for family in text_string_to_metric_families(text)
                if family.samples
            }

        found = wait_for(samples, lambda found: found.keys() >= set(COUNTS))
        return {name: found[name] for name in COUNTS}

    def _add(self, name: str, command: Callable[[], Sequence[str]]) -> None:
        self._members[name] = _Member(name, command, self.directory / "logs" / f"{name}.log")

    def _takes_signals(self, name: str) -> bool:
        """Whether this process is ready, so that it exits cleanly on SIGTERM."""
        member = self._members[name]
        if member.must_end:
            return False
        if name == REDIS:
            return answers_ping(self._redis_port)
        if name in APIS:
            return is_healthy(self._urls[name])
        started = self._records.last(name, Started)
        return started is not None and started.pid == member.process.pid

    def _redis(self) -> list[str]:
        return [
            *redis_command(self._redis_port, self.directory / REDIS, bundled_redis()),
            *("--appendfsync", self._settings.appendfsync),
            *("--auto-aof-rewrite-min-size", str(_REWRITE_FROM_BYTES)),
            *("--auto-aof-rewrite-percentage", str(_REWRITE_AT_GROWTH_PERCENT)),
        ]

    def _run_api(self, name: str) -> list[str]:
        return [
            *(sys.executable, "-m", "grpo_api"),
            *("--port", self._urls[name].rpartition(":")[2]),
            *("--redis-url", f"redis://127.0.0.1:{self._redis_port}/0"),
            *("--redis-deadline-s", str(_REDIS_DEADLINE_S)),
            *("--environment-timeout-s", str(_ENVIRONMENT_TIMEOUT_S)),
            *("--run-id", "soak"),
        ]

    def _trainer(self) -> list[str]:
        """Consecutive processes use different replicas."""
        options = trainer.Options(
            url=next(self._trainer_urls), batch_size=BATCH_SIZE, **self._common(TRAINER)
        )
        return _module(trainer, options)

    def _environment(self, number: int) -> list[str]:
        """Each replica gets half of the environments."""
        urls = list(self._urls.values())
        options = environment.Options(
            number=number,
            urls=urls if number % 2 else urls[::-1],
            group_size=GROUP_SIZES[number],
            minimum=0.0 if number else MINIMUM,
            **self._common(ENVIRONMENTS[number]),
        )
        return _module(environment, options)

    def _common(self, name: str) -> dict[str, Any]:
        settings = self._settings
        return {
            "journal": journal_path(self.directory, name),
            "deadline_s": settings.call_deadline_s,
            "seed": settings.seed,
        }


def _module(module: ModuleType, options: BaseModel) -> list[str]:
    return [sys.executable, "-m", module.__name__, options.model_dump_json()]
