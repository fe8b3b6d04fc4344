"""What each service of a run reads of its settings: the values of its options, by field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from grpo_core.listening import LOOPBACK, url_on_this_host
from grpo_core.redis.keys import default_run_id
from grpo_core.redis.url import WITHOUT_REDIS
from grpo_core.rollouts.files import ROLLOUTS
from grpo_core.security import plain
from grpo_core.settings.command import SHARED_VARIABLES
from grpo_core.tree.environment_values import AGENT, AGENT_OPTIONS, UNIFORM
from grpo_core.tree.sections import ENVIRONMENT, RUN_API, SERVER, TRAINER
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.weights import KINDS
from grpo_core.weights import bridge_config
from grpo_core.weights.directory_checks import LORA_RANKS, SERVED_WEIGHTS
from grpo_runs.defaults import SIZE_NAMES, name_of_task
from grpo_runs.models import default_max_model_len
from grpo_runs.run_directory import RunDirectory, server_names
from grpo_runs.settings.launch_options import LaunchOptions

RESIDENT_ADAPTERS = 2
"""The newest one, and the previous one until its requests in flight are answered."""
WARMUP_STEPS = 5
_MORE_PORTS = frozenset({"health_port", "control_port"})
_UNKNOWN_PORT = 1
_UNKNOWN_REDIS = "redis://127.0.0.1:6379/0"


def url(port: int) -> str:
    return f"http://{LOOPBACK}:{port}"


@dataclass(frozen=True)
class Places:
    """Where the services of one run find each other, and their files.

    Args:
        model: a directory or an id on the hub
        host: where the inference servers listen
        server_ports: one for each inference server of this machine
        redis_url: may hold a password, so it is never in a command line
        weights_socket: for `shared_vllm`
        bridge_config: for `shared_vllm`
        run: the directory of a run whose services are all started here
        teacher_port: of the teacher's server that the run starts; 0: it starts none
    """

    model: str
    run_api_url: str
    server_ports: Sequence[int]
    redis_url: str = field(repr=False)
    run_id: str
    save_path: Path
    weights_socket: Path
    bridge_config: Path
    run: RunDirectory | None = None
    teacher_port: int = 0
    host: str = LOOPBACK

    @classmethod
    def of(
        cls,
        settings: LaunchOptions,
        model: str,
        weights_socket: Path = Path("weights.sock"),
        run: RunDirectory | None = None,
        redis_url: str = _UNKNOWN_REDIS,
        free_port: Callable[[], int] = lambda: _UNKNOWN_PORT,
    ) -> Places:
        """Choose the places of a run. Args: run, redis_url, free_port: if all services are started
        here. Without `free_port` the places are those of a check, before the ports are chosen"""
        if run is None:
            return cls(
                model,
                settings.run_api_url,
                settings.server_ports,
                settings.redis_url.get_secret_value(),
                settings.run_id or default_run_id(settings.port),
                settings.save_path,
                weights_socket,
                settings.log_dir / bridge_config.FILE_NAME,
                host=settings.host,
            )
        return cls(
            model,
            url(free_port()),
            [free_port() for _ in range(settings.servers)],
            redis_url,
            run.run_id,
            run.checkpoints,
            weights_socket,
            run.path / bridge_config.FILE_NAME,
            run,
            free_port() if settings.starts_teacher else 0,
        )

    @property
    def weights_directory(self) -> Path:
        """Absolute, so that server and trainer mean the same directory."""
        return (self.save_path / SERVED_WEIGHTS).absolute()

    @property
    def server_urls(self) -> list[str]:
        """For clients on this host."""
        return [url_on_this_host(self.host, port) for port in self.server_ports]

    @property
    def server_names(self) -> list[str]:
        return server_names(len(self.server_ports))

    def teacher_model(self, settings: LaunchOptions) -> str:
        """A directory or an id on the hub. A model that this project makes is made once."""
        named = settings.teacher_model or ""
        return self.model if named == settings.model else named

    @property
    def environment(self) -> dict[str, str]:
        """Variables of server and trainer."""
        return {"REDIS_URL": self.redis_url}


def trainer_values(settings: LaunchOptions, places: Places) -> dict[str, Any]:
    mode = settings.weight_mode
    whole = {} if places.run is None else _of_whole_run(settings, places.run)
    values: dict[str, Any] = {
        **(_DEFAULTS_OF_TRAINER if whole else {}),
        **settings.given(TRAINER),
        **whole,
        "mode": mode.name,
        "model": places.model,
        "save_path": places.save_path,
        "run_api_url": places.run_api_url,
        "inference_url": places.server_urls[0],
        "log_level": settings.log_level,
        "redis_url": SecretStr(places.redis_url),
    }
    if settings.trainer_device != settings.device:
        values["device"] = settings.trainer_device
    several = settings.servers > 1 and not mode.shares_memory
    if whole or several:  # a variable may say otherwise
        values.setdefault("num_inference_nodes", settings.servers if several else 0)
    if mode.shares_memory:
        return values | {"weights_socket": places.weights_socket}
    # All of them are passed, as the server's follow from them and variables could differ.
    values |= {"run_id": places.run_id}
    if mode.trains_adapter:
        for name in ("lora_r", "lora_alpha", "lora_dropout"):
            values[name] = getattr(settings, name)
    values["vllm_restart_interval"] = settings.vllm_restart_interval
    if mode.loads_adapters and settings.vllm_restart_interval is None:
        values["adapter_sync_interval"] = settings.adapter_sync_interval
    return values


_DEFAULTS_OF_TRAINER: Mapping[str, Any] = {
    "benchmark": True,
    # Steps take a second, and a model for each would fill the disk.
    "checkpoint_interval": 0,
}
"""Of a run whose services are all started here."""
_SIZES_OF_SERVER = frozenset({"max_model_len", "gpu_memory_utilization"})
"""The trainer uses them only if it starts a server."""


def _of_whole_run(settings: LaunchOptions, run: RunDirectory) -> dict[str, Any]:
    given = settings.given(TRAINER)
    fields = TrainerSettings.model_fields | KINDS[settings.mode].model_fields
    sizes = [name for name in SIZE_NAMES if name in fields and name not in _SIZES_OF_SERVER]
    return {name: getattr(settings, name) for name in sizes} | {
        "warmup_steps": given.get(
            "warmup_steps", None if "warmup_ratio" in given else WARMUP_STEPS
        ),
        # On a GPU the trainer chooses the optimizer that needs less memory.
        "optimizer": given.get("optimizer", None if settings.on_gpu else "adamw"),
        "seed": settings.seed,
        "device": settings.device,
        "dtype": settings.weights_dtype,
        # It starts together with the server and must wait for it.
        "service_deadline_s": given.get("service_deadline_s", settings.server_deadline_s),
        "metrics_file": run.metrics,
        "rollouts_dir": run.path / ROLLOUTS,
        "run_api_token": settings.run_api_token,
        "vllm_api_key": settings.run_api_token,
    }


def server_values(settings: LaunchOptions, places: Places, number: int = 0) -> dict[str, Any]:
    """Without what the launcher adds for vLLM: see `vllm_words`.

    Args: number: of the server, counted from 0
    """
    mode, is_run = settings.weight_mode, places.run is not None
    given = settings.given(SERVER)
    # The ports of several servers are counted up from those that were given.
    given |= {name: given[name] + number for name in _MORE_PORTS & given.keys() if given[name]}
    if settings.servers > 1:
        given["server_name"] = places.server_names[number]
    values = given | {
        "model": places.model,
        "host": places.host,
        "port": places.server_ports[number],
        "run_id": places.run_id,
        "redis_url": SecretStr(places.redis_url),
        "log_level": settings.log_level,
        # A variable such as VLLM_ENABLE_SHARED_WEIGHTS may say otherwise.
        "share_weights": mode.shares_memory,
        "engine_arguments": settings.vllm_words,
    }
    if is_run:
        values["api_key"] = settings.run_api_token
    if mode.shares_memory:
        values["weights_socket"] = places.weights_socket
        values["bridge_config_path"] = places.bridge_config
    else:
        values["weights_dir"] = places.weights_directory
    if mode.trains_adapter:
        rank = settings.lora_r
        values |= {
            "enable_lora": True,
            "max_loras": RESIDENT_ADAPTERS,
            "max_lora_rank": next((held for held in LORA_RANKS if held >= rank), LORA_RANKS[-1]),
        }
    return values


def teacher_values(settings: LaunchOptions, places: Places) -> dict[str, Any]:
    """Values for the teacher's server, which takes no part in the run."""
    return {
        "model": places.teacher_model(settings),
        "host": LOOPBACK,
        "port": places.teacher_port,
        "redis_url": SecretStr(WITHOUT_REDIS),
        "log_level": settings.log_level,
        "share_weights": False,
        "api_key": settings.run_api_token,
    }


def vllm_words(settings: LaunchOptions, model: str) -> list[str]:
    """Options of vLLM that follow from the settings. The user's own come later and win."""
    length = settings.max_model_len or default_max_model_len(model)
    if not settings.starts_all:
        dtype = [] if settings.dtype == "auto" else ["--dtype", settings.dtype]
        has_share = settings.on_gpu or "gpu_memory_utilization" in settings.model_fields_set
        utilization = str(settings.gpu_memory_utilization)
        share = ["--gpu-memory-utilization", utilization] if has_share else []
        return [*dtype, *share, "--max-model-len", str(length)]
    return settings.engine_words(length, settings.kv_cache_mib)


def environment_values(settings: LaunchOptions, places: Places, task: str) -> dict[str, Any]:
    run = places.run
    defaults: dict[str, Any] = {
        "group_size": settings.group_size,
        "max_batches_offpolicy": 1,
        "start_deadline_s": settings.server_deadline_s,
    }
    given = settings.given(ENVIRONMENT)
    if AGENT in settings.task and task != AGENT:
        given = {name: value for name, value in given.items() if name not in AGENT_OPTIONS}
    values = defaults | given
    values |= {
        "task": task,
        "action": "serve",
        "model": places.model,
        "run_api_url": places.run_api_url,
        "inference_url": tuple(places.server_urls),
        "seq_len": settings.seq_len,
        "max_completion_tokens": settings.completion_limit(task),
        "seed": settings.seed,
        "wandb_name": name_of_task(task),
        "log_level": settings.log_level,
        "run_api_token": settings.run_api_token,
        "vllm_api_key": settings.run_api_token,
        # run-api reports the earlier run until the trainer of the resumed run registers.
        "steps": settings.steps if settings.resumed else None,
        "eval_every": settings.evaluates_every or None,
    }
    if settings.starts_teacher:
        values |= {
            "teacher_url": url(places.teacher_port),
            "teacher_model": places.teacher_model(settings),
            "teacher_api_key": settings.run_api_token,
        }
    if port := values.get("metrics_port"):  # that of the trainer
        values["metrics_port"] = port + 1 + settings.task.index(task)
    if run is not None:
        values["untrained_dir"] = run.untrained / name_of_task(task)
    if run is not None and settings.evaluates_every:
        values["eval_output"] = run.evaluations
    if run is not None and values.get("curriculum", UNIFORM) != UNIFORM:
        values["curriculum_dir"] = run.curricula / name_of_task(task)
    return {name: value for name, value in values.items() if value is not None}


def run_api_values(settings: LaunchOptions, places: Places) -> dict[str, Any]:
    return settings.given(RUN_API) | {
        "host": LOOPBACK,
        "port": urlsplit(places.run_api_url).port,
        "run_id": places.run_id,
        "log_level": settings.log_level,
    }


def secret_variables(**values: SecretStr | None) -> dict[str, str]:
    """The variables of secrets that were given, by field; other users can read command lines."""
    plain_texts = {name: plain(value) for name, value in values.items()}
    return {SHARED_VARIABLES[name]: text for name, text in plain_texts.items() if text}


def token_variables(settings: LaunchOptions) -> dict[str, str]:
    """The variables of the access token, if all services are started here."""
    token = settings.run_api_token
    return secret_variables(run_api_token=token, vllm_api_key=token)
