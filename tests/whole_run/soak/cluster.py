"""The processes of the soak: Redis, two run-api processes, four environments, a trainer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from grpo_core.redis.server import bundled_redis, redis_command
from grpo_runs.process.ports import free_port
from tests.support.wait import wait_for
from tests.whole_run.commands import ENVIRONMENT, REDIS, RUN_API, TRAINER, Shape
from tests.whole_run.journal import Entry
from tests.whole_run.rig import Rig
from tests.whole_run.soak.groups import READY
from tests.whole_run.verdict import Evidence

APIS = (RUN_API, f"{RUN_API}-2")
ENVIRONMENTS = tuple(f"{ENVIRONMENT}-{number}" for number in range(4))
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


@dataclass
class SoakCommands:
    """Those of `Commands`, for the soak. Args: appendfsync: always, everysec or no"""

    directory: Path
    seconds: float
    seed: int
    appendfsync: str
    shape, mode = Shape(""), ""
    start_order = ((REDIS,), APIS, (TRAINER,), ENVIRONMENTS)

    def __post_init__(self) -> None:
        self.ports = {name: free_port() for name in (REDIS, *APIS)}
        self._trainer_urls = cycle(map(self.url, APIS))
        self.checkpoints = self.directory
        # Of every call, with its retries. A short soak runs beside other tests.
        self.call_deadline_s = 45.0 if self.seconds >= _LONG_SOAK_S else 120.0

    def close(self) -> None:
        """Nothing is left but the directory."""

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def variables(self) -> dict[str, str]:
        return {}

    def of(self, name: str) -> list[str]:
        commands: dict[str, Callable[[], list[str]]] = {REDIS: self._redis, TRAINER: self._trainer}
        if name in APIS:
            return self._run_api(name)
        return commands.get(name, lambda: self._environment(ENVIRONMENTS.index(name)))()

    def _redis(self) -> list[str]:
        directory = self.directory / REDIS
        directory.mkdir(exist_ok=True)
        return [
            *redis_command(self.ports[REDIS], directory, bundled_redis()),
            *("--appendfsync", self.appendfsync),
            *("--auto-aof-rewrite-min-size", str(_REWRITE_FROM_BYTES)),
            *("--auto-aof-rewrite-percentage", str(_REWRITE_AT_GROWTH_PERCENT)),
        ]

    def _run_api(self, name: str) -> list[str]:
        return [
            *(sys.executable, "-m", "grpo_api", "--port", str(self.ports[name])),
            *("--redis-url", f"redis://127.0.0.1:{self.ports[REDIS]}/0"),
            *("--redis-deadline-s", str(_REDIS_DEADLINE_S)),
            *("--environment-timeout-s", str(_ENVIRONMENT_TIMEOUT_S), "--run-id", "soak"),
        ]

    def _trainer(self) -> list[str]:
        """Consecutive processes use different replicas."""
        return self._ours("trainer", url=next(self._trainer_urls), batch_size=BATCH_SIZE)

    def _environment(self, number: int) -> list[str]:
        """Each replica gets half of the environments."""
        return self._ours(
            "environment",
            number=number,
            urls=[self.url(name) for name in (APIS if number % 2 else APIS[::-1])],
            group_size=GROUP_SIZES[number],
            minimum=0.0 if number else MINIMUM,
        )

    def _ours(self, module: str, **options: Any) -> list[str]:
        options |= {"deadline_s": self.call_deadline_s, "seed": self.seed}
        return [sys.executable, "-m", f"tests.whole_run.soak.{module}", json.dumps(options)]


class SoakRig(Rig):
    def _is_ready(self, name: str) -> bool:
        if name in (TRAINER, *ENVIRONMENTS):
            return READY in self.log(name)
        return super()._is_ready(name)

    def taken(self) -> list[Entry]:
        return [entry for entry in self.journals.entries(TRAINER) if "batch" in entry]

    def evidence(self, queued: int | None = None) -> Evidence:
        return replace(super().evidence(queued), sequences=BATCH_SIZE)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("/status").json()
        return found

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

    def _ask(self, path: str) -> httpx.Response:
        """Repeat while run-api answers 503 because Redis is suspended."""
        url = f"{self.run_api_url}{path}"
        answer = wait_for(lambda: httpx.get(url), lambda a: a.status_code != 503)
        return answer.raise_for_status()
