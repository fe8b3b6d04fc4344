"""Command line, variables and health check of each service of a local run."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_core.redis.server import REDIS_DEADLINE_S, answers_ping, disk_bytes, redis_command
from grpo_core.redis.url import redis_password
from grpo_core.rollouts.files import ROLLOUTS
from grpo_core.security import plain
from grpo_core.settings import without_secrets
from grpo_core.settings.machine import SMOLLM2, does_not_answer
from grpo_runs.defaults import name_of_task
from grpo_runs.modes import HandOff
from grpo_runs.process.health import HealthProbe
from grpo_runs.process.ports import free_port
from grpo_runs.process.stack import Service, Stack, start_on_screen
from grpo_runs.run_directory import RUNS, RunDirectory
from grpo_runs.screen import Screen
from grpo_runs.service_options import ENV, MODULES, SERVER, TRAINER, service_words
from grpo_runs.settings import DemoSettings
from grpo_runs.settings.demo import TINY_MODEL
from grpo_runs.settings.services import ServerOptions

HOST = "127.0.0.1"
MAX_NUM_SEQS = 256
NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""Without it the first request takes seconds, since vLLM compiles one function in eager mode too.
"""
LONGEST_SOCKET_PATH = 107  # bytes: sun_path of unix(7) without its final zero
MODEL_PATH_FILE = "model-path"


class SocketPathTooLong(GrpoError):
    """The path of the temporary directory is too long for a unix socket in it."""


@dataclass(frozen=True)
class ServiceFactory:
    """Builds the services of one run. `model` is a directory or an id on the hub."""

    settings: DemoSettings
    run: RunDirectory
    probe: HealthProbe

    def redis(self, port: int) -> Service:
        return Service(
            name="redis",
            role="stores the queue of scored groups",
            command=redis_command(
                port,
                self.run.redis,
                appendfsync=self.settings.redis_appendfsync,
                password=redis_password(self.run.redis),
            ),
            healthy=lambda: answers_ping(port, redis_password(self.run.redis)),
            deadline_s=REDIS_DEADLINE_S,
        )

    def run_api(self, port: int, hand_off: HandOff) -> Service:
        return Service(
            name="run-api",
            role="queues scored groups and hands out batches",
            command=module(
                "grpo_api",
                *("--host", HOST),
                *("--port", port),
                *("--redis-disk-bytes", disk_bytes(self.run.redis)),
                *("--run-id", self.run.run_id),
                *("--log-level", self.settings.log_level),
            ),
            healthy=lambda: self.probe.answers(url(port)),
            deadline_s=self.settings.sizes.start_deadline_s,
            environment=child_environment(threads=1)
            | {"REDIS_URL": hand_off.redis_url}
            | self._token(),
        )

    def vllm_server(self, port: int, model: str, hand_off: HandOff) -> Service:
        settings, sizes = self.settings, self.settings.sizes
        return inference_server(
            settings,
            self.probe,
            port,
            model,
            hand_off.server_flags(),
            hand_off.environment() | self._token(),
            max_model_len=sizes.max_model_len,
            kv_cache_mib=sizes.kv_cache_mib,
            deadline_s=sizes.server_deadline_s,
        )

    def trainer(self, model: str, run_api_port: int, vllm_port: int, hand_off: HandOff) -> Service:
        settings, sizes = self.settings, self.settings.sizes
        return Service(
            name="trainer",
            role="trains the policy and publishes its weights",
            command=module(
                MODULES[TRAINER],
                *("--model", model),
                *hand_off.trainer_flags(),
                *("--run-api-url", url(run_api_port)),
                *("--inference-url", url(vllm_port)),
                *("--steps", sizes.steps),
                *("--batch-size", sizes.batch_size),
                *("--gradient-accumulation-steps", sizes.gradient_accumulation_steps),
                *("--lr", sizes.lr),
                *("--warmup-steps", settings.warmup_steps),
                # On a GPU the trainer chooses the optimizer that needs less memory.
                *(() if settings.on_gpu else ("--optimizer", "adamw")),
                *("--dtype", settings.weights_dtype),
                *("--device", settings.device),
                *("--seq-len", sizes.seq_len),
                *("--seed", settings.seed),
                *("--metrics-file", self.run.metrics),
                *("--rollouts-dir", self.run.path / ROLLOUTS),
                "--benchmark",
                *("--log-level", settings.log_level),
                # Steps take a second, and a model for each would fill the disk.
                *("--checkpoint-interval", 0),
                # It starts together with the server and must wait for it.
                *("--service-deadline-s", sizes.server_deadline_s),
                *service_words(settings.options_of(TRAINER)),
            ),
            healthy=lambda: self.probe.trainer_is_registered(url(run_api_port)),
            deadline_s=sizes.start_deadline_s,
            environment=child_environment(settings.compute_threads, model)
            | hand_off.environment()
            | self._token(),
            may_finish=True,
            # In some modes grpo starts a server itself if nothing listens yet.
            may_start=lambda: _accept_connections(run_api_port, vllm_port),
        )

    def environment(self, task: str, model: str, run_api_port: int, vllm_port: int) -> Service:
        settings, sizes, name = self.settings, self.settings.sizes, name_of_task(task)
        return Service(
            name=self.environment_name(task),
            role=f"asks for completions of {name} and grades them",
            command=module(
                MODULES[ENV],
                *(task, "serve"),
                *("--run-api-url", url(run_api_port)),
                *("--inference-url", url(vllm_port)),
                *("--model", model),
                *("--group-size", settings.group_size),
                *("--seq-len", sizes.seq_len),
                *(
                    ("--max-completion-tokens", limit)
                    if (limit := settings.completion_limit(task))
                    else ()
                ),
                *("--max-batches-offpolicy", settings.max_batches_offpolicy),
                *("--seed", settings.seed),
                *(("--data", settings.data) if settings.data else ()),
                *("--wandb-name", name),
                *(
                    ("--eval-every", every, "--eval-output", self.run.evaluations)
                    if (every := settings.evaluates_every)
                    else ()
                ),
                *("--start-deadline-s", sizes.server_deadline_s),
                *("--log-level", settings.log_level),
                # run-api reports the earlier run until the trainer of the resumed run registers.
                *(("--steps", sizes.steps) if settings.resume else ()),
                *service_words(settings.options_of(ENV)),
            ),
            healthy=lambda: self.probe.has_environment(url(run_api_port), name),
            deadline_s=sizes.start_deadline_s,
            environment=child_environment(1, model, offline=not self._data_is_on_the_hub(task))
            | self._token(),
            may_finish=True,  # after the last batch
            may_start=lambda: _accept_connections(run_api_port),
        )

    def _token(self) -> dict[str, str]:
        """Variables for run-api and the server; other users can read command lines."""
        token = plain(self.settings.run_api_token)
        return {} if token is None else {"RUN_API_TOKEN": token, "VLLM_API_KEY": token}

    def environment_name(self, task: str) -> str:
        return (
            "environment" if len(self.settings.task) == 1 else f"environment-{name_of_task(task)}"
        )

    def _data_is_on_the_hub(self, task: str) -> bool:
        data = self.settings.data
        return task != "arithmetic" and data is not None and not Path(data).expanduser().exists()


def inference_server(
    settings: ServerOptions,
    probe: HealthProbe,
    port: int,
    model: str,
    flags: Sequence[str],
    variables: dict[str, str],
    *,
    max_model_len: int,
    kv_cache_mib: int | None,
    deadline_s: float,
) -> Service:
    """
    Args:
        flags, variables: those of the command that starts the server
        kv_cache_mib: None: vLLM takes what the weights leave of its share of the GPU's memory
    """
    return Service(
        name="vllm-server",
        role="samples completions from the policy",
        command=module(
            MODULES[SERVER],
            *("--model", model),
            *("--host", HOST),
            *("--port", port),
            *("--health-port", free_port()),
            *flags,
            *("--log-level", settings.log_level),
            *("--dtype", settings.weights_dtype),
            *("--max-model-len", max_model_len),
            *("--max-num-seqs", MAX_NUM_SEQS),
            *(["--enforce-eager"] if settings.starts_eager else []),
            # vLLM would take nearly all of a GPU, and the trainer needs the rest.
            *(
                ("--gpu-memory-utilization", settings.gpu_memory_utilization)
                if settings.on_gpu
                else ()
            ),
            *(("--kv-cache-memory-bytes", kv_cache_mib * 2**20) if kv_cache_mib else ()),
            *("--seed", settings.seed),
            *service_words(settings.options_of(SERVER)),
        ),
        healthy=lambda: probe.answers(url(port)),
        deadline_s=deadline_s,
        environment=child_environment(settings.compute_threads, model)
        | (NO_COMPILER if settings.starts_eager else {})
        | variables,
    )


def model_job(model: str | None, path_file: Path, threads: int, deadline_s: float) -> Service:
    """A job that makes a model, and writes the path of its directory into `path_file`.

    Args:
        model: SMOLLM2; None: the tiny model
    """
    flags = [] if model is None else [f"--{SMOLLM2}"]
    named = "the tiny model" if model is None else f"{SMOLLM2}, which takes 25 s,"
    return Service(
        name="model",
        role=f"makes {named} or finds it in the cache",
        command=module("grpo_tiny_model", *flags, "--path-file", path_file),
        healthy=lambda: False,  # it is done when it has ended
        deadline_s=deadline_s,
        environment=child_environment(threads),
        may_finish=True,
    )


def make_smollm2(stack: Stack, screen: Screen, deadline_s: float) -> str:
    """The model's directory.

    Raises:
        ProcessFailed: the model could not be made, or not within the deadline.
        StopRequested: a stop signal arrived.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-") as temporary:
        path_file = Path(temporary) / MODEL_PATH_FILE
        job = model_job(SMOLLM2, path_file, os.cpu_count() or 1, deadline_s)
        start_on_screen(stack, [job], screen)
        return path_file.read_text().strip()


def command_lines(settings: DemoSettings) -> list[str]:
    """One line per service, without secrets. Starts nothing."""
    run = RunDirectory(settings.resume or settings.run_dir or RUNS / "new")
    model = settings.model or TINY_MODEL
    redis_port, api_port, vllm_port = free_port(), free_port(), free_port()
    hand_off = settings.hand_off(redis_url(redis_port), run, Path("weights.sock"))
    with HealthProbe() as probe:
        factory = ServiceFactory(settings, run, probe)
        services = [
            factory.run_api(api_port, hand_off),
            factory.vllm_server(vllm_port, model, hand_off),
            factory.trainer(model, api_port, vllm_port, hand_off),
            *(factory.environment(task, model, api_port, vllm_port) for task in settings.task),
        ]
    return [shlex.join(without_secrets(service.command)[0]) for service in services]


def _accept_connections(*ports: int) -> bool:
    return not any(does_not_answer(url(port)) for port in ports)


def url(port: int) -> str:
    return f"http://{HOST}:{port}"


def redis_url(port: int) -> str:
    return f"redis://{HOST}:{port}/0"


def weights_socket_path(directory: Path) -> Path:
    """Raises `SocketPathTooLong` if the kernel would refuse the path."""
    path = directory / "weights.sock"
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise SocketPathTooLong(
            f"{path} is longer than {LONGEST_SOCKET_PATH} bytes; set TMPDIR to a shorter path"
        )
    return path


def child_environment(
    threads: int, model: str | None = None, offline: bool = True
) -> dict[str, str]:
    """Variables of a child process, besides those of the runner.

    Args:
        offline: a child that loads a local `model` needs nothing else from the hub
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # the last lines of a process that dies must reach its log
    }
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [os.environ.get(name), HOST, "localhost"]))
    if offline and model is not None and Path(model).is_dir():
        # Otherwise each start asks the hub about a model that the hub does not have.
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def module(name: str, *arguments: str | int | float | Path) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", name, *(str(argument) for argument in arguments)]
