"""The command line, environment and health check of each service of a local run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_core.security.bearer_token import plain
from grpo_core.weights import bridge_config
from grpo_local.defaults import Sizes
from grpo_local.modes import HandOff
from grpo_local.process.health import HealthProbe
from grpo_local.process.ports import free_port
from grpo_local.process.redis_server import REDIS_DEADLINE_S, answers_ping, redis_command
from grpo_local.process.stack import Service
from grpo_local.run_directory import RunDirectory
from grpo_local.settings import DemoSettings, TaskName

HOST = "127.0.0.1"
MAX_NUM_SEQS = 64
LONGEST_SOCKET_PATH = 107  # bytes, sun_path of unix(7) less its end mark
TINY_MODEL_PATH_FILE = "tiny-model-path"
NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""Without it vLLM's first request waits seconds for a compiler, in eager mode too."""
GPU_CONTROL = Path("/dev/nvidiactl")
"""There where the NVIDIA driver is loaded."""


class SocketPathTooLong(GrpoError):
    """The temporary directory leaves no room for the name of a Unix socket."""


@dataclass(frozen=True)
class ServiceFactory:
    """Builds the services of one run. `model` is a checkpoint directory or a hub id."""

    settings: DemoSettings
    sizes: Sizes
    run: RunDirectory
    probe: HealthProbe

    def tiny_model(self, path_file: Path) -> Service:
        """A job that makes the model, or finds it in its cache, and writes where it is."""
        return Service(
            name="model",
            command=module("grpo_tiny_model", "--path-file", path_file),
            healthy=lambda: False,  # it is done when it has ended
            deadline_s=self.settings.model_deadline_s,
            environment=child_environment(threads=2 * self.settings.compute_threads),
            may_finish=True,
        )

    def redis(self, port: int) -> Service:
        return Service(
            name="redis",
            command=redis_command(port, self.run.redis, None, self.settings.redis_appendfsync),
            healthy=lambda: answers_ping(port),
            deadline_s=REDIS_DEADLINE_S,
        )

    def run_api(self, port: int, redis_port: int) -> Service:
        return Service(
            name="run-api",
            command=module(
                "grpo_api",
                *("--host", HOST),
                *("--port", port),
                *("--redis-url", redis_url(redis_port)),
                *("--run-id", self.run.run_id),
            ),
            healthy=lambda: self.probe.answers(url(port)),
            deadline_s=self.sizes.start_deadline_s,
            environment=child_environment(threads=1) | self._token(),
        )

    def hand_off(self, redis_port: int, weights_socket: Path) -> HandOff:
        """How the weights of this run travel."""
        return HandOff(
            options=self.settings,
            restart_every_steps=self.sizes.vllm_restart_interval,
            target_modules=tuple(self.sizes.lora_target_modules),
            redis_url=redis_url(redis_port),
            run_id=self.run.run_id,
            save_path=self.run.checkpoints,
            weights_socket=weights_socket,
            bridge_config=self.run.path / bridge_config.FILE_NAME,
        )

    def vllm_server(self, port: int, model: str, hand_off: HandOff) -> Service:
        gpu_share = self.settings.gpu_memory_utilization
        return Service(
            name="vllm-server",
            command=module(
                "grpo_vllm",
                *("--model", model),
                *("--host", HOST),
                *("--port", port),
                *("--health-port", free_port()),
                *hand_off.server_flags(),
                *("--dtype", self._dtype()),
                *("--max-model-len", self.sizes.max_model_len),
                *("--max-num-seqs", MAX_NUM_SEQS),
                *(["--enforce-eager"] if self.settings.eager else []),
                # vLLM would take nearly all of a GPU, and the trainer has to fit beside it.
                *(("--gpu-memory-utilization", gpu_share) if GPU_CONTROL.exists() else ()),
                *("--kv-cache-memory-bytes", self.sizes.kv_cache_mib * 2**20),
                *("--seed", self.settings.seed),
            ),
            healthy=lambda: self.probe.answers(url(port)),
            deadline_s=self.sizes.server_deadline_s,
            environment=child_environment(self.settings.compute_threads, model)
            | (NO_COMPILER if self.settings.eager else {})
            | hand_off.environment()
            | self._token(),
        )

    def trainer(self, model: str, run_api_port: int, vllm_port: int, hand_off: HandOff) -> Service:
        settings, sizes = self.settings, self.sizes
        return Service(
            name="trainer",
            command=module(
                "grpo_trainer",
                *("--model-name", model),
                *hand_off.trainer_flags(),
                *("--atropos-url", url(run_api_port)),
                *("--vllm-port", vllm_port),
                *("--training-steps", sizes.steps),
                *("--batch-size", sizes.batch_size),
                *("--gradient-accumulation-steps", sizes.gradient_accumulation_steps),
                *("--lr", sizes.lr),
                *("--warmup-steps", settings.warmup_steps),
                *("--optimizer", "adamw"),
                *("--dtype", self._dtype()),
                *("--device", self.settings.device),
                *("--seq-len", sizes.seq_len),
                *("--seed", settings.seed),
                *("--metrics-file", self.run.metrics),
                "--benchmark",
                *("--checkpoint-interval", 0),  # steps take a second: a model each would be many
                # it starts beside the server, and waits for it
                *("--service-deadline-s", sizes.server_deadline_s),
            ),
            healthy=lambda: self.probe.trainer_is_registered(url(run_api_port)),
            deadline_s=sizes.start_deadline_s,
            environment=child_environment(settings.compute_threads, model)
            | hand_off.environment()
            | self._token(),
            may_finish=True,
        )

    def environment(self, task: TaskName, model: str, run_api_port: int, vllm_port: int) -> Service:
        settings, sizes = self.settings, self.sizes
        return Service(
            # several are told apart by their task
            name="environment" if len(settings.task) == 1 else f"environment-{task}",
            command=module(
                "grpo_env",
                *(task, "serve"),
                *("--env.rollout-server-url", url(run_api_port)),
                *("--env.group-size", settings.group_size),
                *("--env.max-token-length", sizes.seq_len),
                *("--env.max-completion-tokens", sizes.max_completion_tokens),
                *("--env.max-batches-offpolicy", settings.max_batches_offpolicy),
                *("--env.seed", settings.seed),
                *(("--env.data", settings.data) if settings.data else ()),
                *("--openai.base-url", f"{url(vllm_port)}/v1"),
                *("--openai.model-name", model),
                *("--openai.start-deadline-s", sizes.server_deadline_s),
            ),
            healthy=lambda: self.probe.has_environment(url(run_api_port), task),
            deadline_s=sizes.start_deadline_s,
            environment=child_environment(1, model, offline=not self._data_is_on_the_hub(task))
            | self._token(),
            may_finish=True,  # it stops by itself once the last batch is delivered
        )

    def _dtype(self) -> str:
        if self.settings.dtype is not None:
            return self.settings.dtype
        takes_float32 = not (GPU_CONTROL.exists() and self.settings.weight_mode.trains_adapter)
        return "float32" if takes_float32 else "bfloat16"

    def _token(self) -> dict[str, str]:
        """One for run-api and the inference server, as variables: everybody may read a command
        line."""
        token = plain(self.settings.run_api_token)
        return {} if token is None else {"RUN_API_TOKEN": token, "VLLM_API_KEY": token}

    def _data_is_on_the_hub(self, task: TaskName) -> bool:
        data = self.settings.data
        return task == "gsm8k" and data is not None and not Path(data).expanduser().is_dir()


def url(port: int) -> str:
    return f"http://{HOST}:{port}"


def redis_url(port: int) -> str:
    return f"redis://{HOST}:{port}/0"


def weights_socket_path(directory: Path) -> Path:
    """Raises `SocketPathTooLong` where the kernel would refuse it."""
    path = directory / "weights.sock"
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise SocketPathTooLong(
            f"{path} is longer than {LONGEST_SOCKET_PATH} bytes; point TMPDIR at a shorter path"
        )
    return path


def child_environment(
    threads: int, model: str | None = None, offline: bool = True
) -> dict[str, str]:
    """What a child gets on top of the runner's own environment.

    `offline` says that a child which loads a local `model` needs nothing else from the hub.
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # the last words of a process that dies must reach its log
    }
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [os.environ.get(name), HOST, "localhost"]))
    if offline and model is not None and Path(model).is_dir():
        # Without this every start asks the hub for news of a checkpoint that it does not have.
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def module(name: str, *arguments: str | int | float | Path) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", name, *(str(argument) for argument in arguments)]
