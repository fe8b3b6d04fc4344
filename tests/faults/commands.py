"""The command lines of a run whose processes are killed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from grpo_local.redis_server import bundled_redis, redis_command
from tests.fixtures.inference import SMALL

REDIS, RUN_API, SERVER, ENVIRONMENT, TRAINER = (
    *("redis", "run-api", "vllm-server", "environment", "trainer"),
)
SHARED = "shared_vllm"
RESTART_EVERY_STEPS = 3
LORA_MODES = ("lora_only", "lora_restart")
GROUP_SIZE, BATCH_SIZE = 4, 16
RUN_ID = "faults"
STEPS = 100_000
"""More than any test waits for."""
STATE_INTERVAL = 3
PAUSE_LEASE_S = 120
"""The longest that the server grants: a pause that ends earlier did not wait for its lease."""


@dataclass(frozen=True)
class Ports:
    redis: int
    run_api: int
    server: int
    health: int


@dataclass(frozen=True)
class Commands:
    """Args: mode: how weights reach the server."""

    directory: Path
    socket: Path
    model: str
    mode: str
    ports: Ports

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def run_api_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.run_api}"

    @property
    def server_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.server}"

    def of(self, name: str) -> list[str]:
        commands = {
            REDIS: self._redis,
            RUN_API: self._run_api,
            SERVER: self._server,
            ENVIRONMENT: self._environment,
            TRAINER: self._trainer,
        }
        return commands[name]()

    def _redis(self) -> list[str]:
        return [
            *redis_command(self.ports.redis, self.directory / REDIS, bundled_redis()),
            *("--appendfsync", "always"),  # else a kill may take what was acknowledged
        ]

    def _run_api(self) -> list[str]:
        return [
            *(sys.executable, "-m", "grpo_api"),
            *("--port", str(self.ports.run_api)),
            *("--redis-deadline-s", "3"),
            *self._redis_flags(),
        ]

    def _server(self) -> list[str]:
        return [
            *(sys.executable, "-m", "grpo_vllm"),
            *("--model", self.model),
            *("--port", str(self.ports.server)),
            *("--health-port", str(self.ports.health)),
            *self._how_weights_come(),
            *self._redis_flags(),
            *("--dtype", "float32"),
            *SMALL,
        ]

    def _how_weights_come(self) -> list[str]:
        if self.mode == SHARED:
            config = self.directory / "vllm_bridge_config.json"
            return [
                "--share-weights",
                *("--weights-socket", str(self.socket)),
                *("--bridge-config-path", str(config)),
            ]
        lora = ["--enable-lora"] if self.mode in LORA_MODES else []
        return [*lora, "--weights-dir", str(self.checkpoints / "served_weights")]

    def _environment(self) -> list[str]:
        return [
            *(sys.executable, "-m", "grpo_env", "arithmetic", "serve"),
            *("--env.rollout-server-url", self.run_api_url),
            *("--env.group-size", str(GROUP_SIZE)),
            *("--env.max-completion-tokens", "8"),
            *("--env.max-batches-offpolicy", "2"),
            *("--env.drop-equal-scores", "false"),
            *("--openai.base-url", f"{self.server_url}/v1"),
            *("--openai.model-name", self.model),
        ]

    def _trainer(self) -> list[str]:
        return [
            *(sys.executable, "-m", "tests.faults.staged_trainer"),
            *("--model-name", self.model),
            *("--weight-bridge-mode", self.mode),
            *self._mode_flags(),
            *("--atropos-url", self.run_api_url),
            *("--vllm-port", str(self.ports.server)),
            *("--training-steps", str(STEPS)),
            *("--batch-size", str(BATCH_SIZE // 2)),
            *("--gradient-accumulation-steps", "2"),
            *("--lr", "1e-4"),
            *("--seq-len", "128"),
            *("--metrics-file", str(self.metrics)),
            *("--save-path", str(self.checkpoints)),
            *("--checkpoint-interval", "0"),
            *("--state-interval", str(STATE_INTERVAL)),
        ]

    def _mode_flags(self) -> list[str]:
        if self.mode == SHARED:
            return ["--verify-every-steps", "1", "--pause-lease-s", str(PAUSE_LEASE_S)]
        restarts = ["--vllm-restart-interval", str(RESTART_EVERY_STEPS)]
        return [*self._redis_flags(), *([] if self.mode == "lora_only" else restarts)]

    def _redis_flags(self) -> list[str]:
        url = f"redis://127.0.0.1:{self.ports.redis}/0"
        return ["--redis-url", url, "--run-id", RUN_ID]
