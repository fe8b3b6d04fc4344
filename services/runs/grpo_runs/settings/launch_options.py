"""The options of a run: the tree of all services' options, and those of starting them, with their
sections, names and defaults; and what follows from them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from grpo_core.cpu import CPU
from grpo_core.security import usable_token
from grpo_core.settings import CommandSettings, CommaSeparated, Given, Mistake, Shown, mistakes_of
from grpo_core.settings.machine import TINY
from grpo_core.settings.options import default_text
from grpo_core.tree.environment import EnvironmentOptions
from grpo_core.tree.run_api import RunApiSettings
from grpo_core.tree.sections import SERVER, VIEWS, names_of, sections_of
from grpo_core.tree.server import ServerSettings, worker_count
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.tree.weights import KINDS, ModeName
from grpo_runs.defaults import BY_TASK, OTHER_TASK, SIZE_NAMES, RunSizes, sizes_for
from grpo_runs.models import A_MODEL
from grpo_runs.modes import MODES, Mode

GPU_CONTROL = Path("/dev/nvidiactl")
"""Exists if the NVIDIA driver is loaded."""
MAX_NUM_SEQS = 256
OWN_GPU_SHARE = 0.9
"""Share of a GPU that a server takes if no other service uses it."""


def each_once(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


class ServerHere(CommandSettings):
    """Of commands that start an inference server on this machine."""

    eager: Annotated[bool | None, Shown(default="on; on a GPU off")] = Field(
        None,
        description="Start the server sooner, without compilation and CUDA graphs. With --no-eager,"
        " the server starts later but samples faster, which saves time in long runs",
    )

    device: str
    dtype: str | None
    seed: int
    gpu_memory_utilization: float

    @property
    def on_gpu(self) -> bool:
        """All services use the same device."""
        return GPU_CONTROL.exists() if self.device == "auto" else self.device.startswith("cuda")

    @property
    def weights_dtype(self) -> str:
        if self.dtype not in (None, "auto"):
            return self.dtype
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def starts_eager(self) -> bool:
        return self.eager if self.eager is not None else not self.on_gpu

    def mistakes_in(
        self,
        service: str,
        values: Mapping[str, Any],
        view: type[CommandSettings] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> Iterator[Mistake]:
        """What a service would refuse.

        Args:
            view: its settings, if they check this machine too
            names: of its options here
        """
        for field, message in mistakes_of(view or VIEWS[service], values, view is not None):
            name = (names or {}).get(field or "", field)
            if name in type(self).model_fields:
                yield Mistake(name, message)
            else:
                yield Mistake(None, f"{service}: {name}: {message}" if name else message)

    def engine_words(self, max_model_len: int, kv_cache_mib: int | None) -> list[str]:
        """Options of vLLM, which by default would take nearly all of a GPU."""
        words = ["--dtype", self.weights_dtype, "--max-model-len", str(max_model_len)]
        words += ["--max-num-seqs", str(MAX_NUM_SEQS), "--seed", str(self.seed)]
        words += ["--enforce-eager"] if self.starts_eager else []
        share = str(self.gpu_memory_utilization)
        words += ["--gpu-memory-utilization", share] if self.on_gpu else []
        return words + (
            ["--kv-cache-memory-bytes", str(kv_cache_mib * 2**20)] if kv_cache_mib else []
        )


SETS_ITSELF = (
    *("redis_url", "run_id", "run_api_url", "save_path", "metrics_file", "rollouts_dir"),
    *("host", "port", "health_port", "control_host", "control_port", "log_dir"),
    *("wandb_name", "eval_output", "curriculum_dir", "untrained_dir"),
)
"""Options of a run whose services are all started here: each run has its own."""
OWN_MEANING = frozenset({"stop_grace_s", "start_deadline_s", f"{SERVER}.max_staleness"})
"""Options of services whose name is that of another option here."""
OF_ONE_SERVER = ("server_name", "advertise_url", "staging_dir")
API_KEYS = ("vllm_api_key", "api_key")

_OWN = {
    "model": ("model",),
    "task": ("task",),
    "weights": ("mode",),
    "queue": ("run_api_token",),
    "server": ("servers", "kv_cache_mib", "eager", "server_flags"),
    "run": (
        *("run_dir", "resume", "report", "watch", "compute_threads", "step_deadline_s"),
        *("server_deadline_s", "start_deadline_s", "stop_grace_s", "log_dir"),
        *("on_end", "on_alert"),
    ),
}
GROUPS = sections_of(_OWN)
OWN = frozenset({*(name for names in _OWN.values() for name in names), "server_options"})
"""Options that `--help` describes here: no service has them (`--servers`), or the launcher decides
by them what it starts (`--mode`)."""
ALSO_SHOWN = frozenset(
    {
        *("data", "group_size", "device", "seed", "log_level", "save_path", "run_api_url"),
        *("redis_url", "run_id", "host", "port", "health_port", "adapter_sync_interval"),
        *("lora_r", "lora_alpha", "lora_dropout", "reward_weights"),
    }
)
"""Options of services that most runs set."""
_OF_TRAINER = {
    name: alias for name, alias in CommandLine.command.aliases.items() if name != "vllm-url"
}
ALIASES = {
    **names_of(GROUPS, OWN_MEANING),
    **_OF_TRAINER,
    "vllm-port": "port",
    "command": "agent_command",
    "server.dtype": "dtype",  # an option of vLLM
}

_SIZES = partial(sizes_for, on_gpu=False, given={})
_CASES: Mapping[str, Mapping[str, Any]] = {
    "tiny": vars(BY_TASK["arithmetic"]),
    "gsm8k": vars(BY_TASK["gsm8k"]),
    "own": vars(OTHER_TASK),
    "pretrained": vars(_SIZES(["arithmetic"], MODES["shared_vllm"], is_tiny=False)),
    "adapter": vars(_SIZES(["arithmetic"], MODES["lora_only"], is_tiny=False)),
    "reasoning": vars(_SIZES(["gsm8k"], MODES["shared_vllm"], is_tiny=False)),
    "alone": {name: field.default for name, field in CommandLine.model_fields.items()},
}
_DEFAULTS = {
    "steps": "{tiny}; gsm8k: {gsm8k}; at most {pretrained} with a pretrained model, and if the "
    "engine restarts; without --task: {alone}",
    "batch_size": "{tiny}; gsm8k: {gsm8k}; pretrained models: at most {pretrained}; without "
    "--task: {alone}",
    "gradient_accumulation_steps": "{tiny}; without --task: {alone}",
    "lr": "{tiny}; gsm8k: {gsm8k}; six times as high with an adapter; pretrained models: "
    "{pretrained}, with an adapter {adapter}; without --task: {alone}",
    "warmup_steps": "5; without --task: {alone}",
    "max_completion_tokens": "{tiny}; gsm8k: {gsm8k}; with a pretrained model, gsm8k and reward "
    "functions on a CPU: {reasoning}; other tasks: their own limit",
    "seq_len": "{tiny}; gsm8k: {gsm8k}; your own task: {own}, with a pretrained model {reasoning}; "
    "without --task: {alone}",
    "max_model_len": "{tiny}; gsm8k: {gsm8k}; at least --seq-len; without --task: the model's "
    "limit, at most 4096",
    "kv_cache_mib": "{tiny}; gsm8k: {gsm8k}; on a GPU what --gpu-memory-utilization leaves",
    "step_deadline_s": "{tiny}; pretrained models: {pretrained}; 180 more if the engine restarts",
    "start_deadline_s": "{tiny}; pretrained models: {pretrained}",
    "server_deadline_s": "{tiny}; pretrained models, and without --task: {pretrained}",
    "max_batches_offpolicy": "1",
    "gpu_memory_utilization": "{tiny}; without --task: {alone}",
    "dtype": "float32; on a GPU bfloat16; without --task: the model's",
    "vllm_restart_interval": "{tiny}; without --task: 3; 1 in mode none with --publish update",
    "lora_target_modules": "{pretrained}; with the tiny model every linear layer",
    "eval_every": "before and after the run",
    "checkpoint_interval": "0; without --task: {alone}",
}


def _shown(value: Any) -> str:
    """`3e-4` for 0.0003."""
    is_small = isinstance(value, float) and value < 1e-3
    return f"{value:.0e}".replace("e-0", "e-") if is_small else default_text(value)


DEFAULTS = {
    name: text.format(**{case: _shown(held.get(name)) for case, held in _CASES.items()})
    for name, text in _DEFAULTS.items()
}
"""What applies if these are not given, for the user."""
OF_SERVICES = (
    frozenset(name for names in GROUPS.values() for name in names)
    - OWN
    - DEFAULTS.keys()
    - ALSO_SHOWN
)
"""Options that `--help` only names."""


class WholeRunOptions(CommandSettings):
    """Own options that mean nothing without --task, as those of environments and run-api do."""

    run_dir: Annotated[Path | None, Shown(default="runs/<UTC time>-<seed>")] = Field(
        None, description="New or empty directory for the files of the run"
    )
    report: bool = Field(
        True, description="Write report.html, a page to read the rollouts of the run"
    )
    watch: Annotated[bool | None, Shown(default="on at a terminal, else off")] = Field(
        None,
        description="Serve a page that shows the run while it trains, and open it in a browser if "
        "one is at hand; else print its address",
    )
    kv_cache_mib: int | None = Field(
        None, ge=1, description="Size of the server's KV cache, in MiB"
    )
    step_deadline_s: float = Field(
        300.0,
        gt=0,
        description="The run fails if no training step ends within this number of seconds",
    )
    start_deadline_s: float = Field(
        300.0,
        gt=0,
        description="Seconds to wait for run-api, the trainer and each environment to start",
    )
    compute_threads: Annotated[int, Shown(default="half the cores")] = Field(
        # Server and trainer compute at the same time, so each gets half.
        default_factory=lambda: max(1, CPU.cores // 2),
        ge=1,
        description="Number of CPU threads that the server computes with; several servers share "
        "them. The trainer uses the same number; its ranks share them",
    )
    on_alert: Annotated[str | None, Shown(metavar="COMMAND")] = Field(
        None,
        min_length=1,
        description="The same for each alert, for example if no training step ends for 15 minutes",
    )


NEEDS_TASK = frozenset({*WholeRunOptions.model_fields, "eager"})


class PairOptions(CommandSettings):
    """Own options of a run without --task, of which server and trainer are started here."""

    stop_grace_s: float = Field(
        120.0,
        gt=0,
        description="Without --task: seconds to wait for each process to stop before it is killed",
    )
    log_dir: Path = Field(
        Path("logs"),
        description="Without --task: directory for vllm-server.log and trainer.log",
    )


class LaunchOptions(
    WholeRunOptions,
    PairOptions,
    CommandLine,
    EnvironmentOptions,
    ServerSettings,
    RunApiSettings,
    ServerHere,
):
    """The options of a run, and what follows from them."""

    model: str = Field(min_length=1, description=f"Model: {A_MODEL}")
    task: Annotated[CommaSeparated[str], AfterValidator(each_once)] = Field(  # type: ignore[assignment]
        (),
        min_length=1,
        description="Task: arithmetic (one-digit sums), gsm8k or math (both need --data), your own "
        "reward (my.py:reward) or task (my.py:MyTask), or several of them, separated by commas. "
        "Each task gets its own environment",
    )
    mode: ModeName = Field(
        "shared_vllm",
        description="Weight-sync mode, which decides how the server gets new weights. shared_vllm: "
        "trainer and server share one copy in memory. lora_only: the running server "
        "loads each new adapter. lora_restart: the engine restarts with each new "
        "adapter. none: the running server loads each new model",
    )
    servers: int = Field(
        1,
        ge=1,
        description="Number of inference servers on this machine. Several servers share the cores "
        "of --compute-threads. If one ends, the run goes on with the others. Several servers need "
        "a CPU, and a mode other than shared_vllm",
    )
    resume: Annotated[str | None, Shown(default="none; without --task: auto, as of grpo")] = Field(  # type: ignore[assignment]
        None,
        description="Resume the run in this directory, for example runs/latest. Command-line "
        "options override the directory's config.yaml. To continue a run that has finished, "
        "raise --steps",
    )
    server_deadline_s: float = Field(
        1800.0, gt=0, description="Seconds to wait for the inference server to start"
    )
    run_api_token: SecretStr | None = Field(
        None,
        description="Access token that clients must send to run-api and to the inference server",
    )
    server_flags: str = Field(
        "",
        description="More options for the inference server, in one string, for example "
        "--server-flags='--max-num-seqs 64'",
    )
    on_end: Annotated[str | None, Shown(metavar="COMMAND")] = Field(
        None,
        min_length=1,
        description="Command to run when the run has completed, failed or been stopped. It gets "
        "JSON on its standard input, and the same facts in variables such as GRPO_STATE and "
        "GRPO_TEXT. An http(s) URL gets the JSON in a POST request",
    )
    server_options: tuple[str, ...] = ()
    """Options of vLLM."""

    _usable_token = field_validator("run_api_token")(usable_token)

    @field_validator("server_flags")
    @classmethod
    def _shell_words(cls, value: str) -> str:
        try:
            shlex.split(value)
        except ValueError as error:
            raise ValueError(
                f"cannot split the value into words as a shell does ({error}); check its quotes"
            ) from None
        return value

    @classmethod
    def prepare_file(cls, content: dict[str, Any]) -> dict[str, Any]:
        return content

    @classmethod
    def drop_unused(cls, given: dict[str, Given], environment: Mapping[str, str]) -> Iterator[str]:
        if "task" in given:  # variables such as REDIS_URL are about another run
            for name in (*SETS_ITSELF, *API_KEYS):
                if name in given and given[name].name in environment:
                    del given[name]
        mode = given.setdefault("mode", Given("shared_vllm", "--mode"))
        if str(mode.value) in KINDS:
            yield from CommandLine.drop_unused(given, environment)

    @property
    def starts_all(self) -> bool:
        """Whether all services are started here, and not only server and trainer."""
        return bool(self.task)

    @property
    def starts_teacher(self) -> bool:
        """Whether the run starts the server of its teacher."""
        return self.starts_all and self.teacher_model is not None and self.teacher_url is None

    @property
    def resumed(self) -> Path | None:
        """The directory of the run that goes on; None for a new one."""
        return Path(self.resume) if self.starts_all and self.resume else None

    @property
    def weight_mode(self) -> Mode:
        return Mode.of(self._part(KINDS[self.mode]))

    @property
    def publish_every_steps(self) -> int:
        return self._part(KINDS[self.mode]).publish_every_steps

    @property
    def evaluates_every(self) -> int:
        """Steps between evaluations; 0: none. By default before and after the run."""
        return self.eval_every if "eval_every" in self.model_fields_set else self.steps

    @property
    def vllm_words(self) -> list[str]:
        """Options of vLLM."""
        return [*shlex.split(self.server_flags), *self.server_options]

    @property
    def may_start_redis(self) -> bool:
        return "redis_url" not in self.model_fields_set

    @property
    def server_ports(self) -> range:
        """Where the servers listen, if run-api runs already."""
        return range(self.port, self.port + self.servers)

    @property
    def server_workers(self) -> int:
        """Processes that compute in each server."""
        return worker_count(self.vllm_words)

    @property
    def server_threads(self) -> int:
        """Of each worker."""
        workers = self.servers * self.server_workers
        return max(1, self.compute_threads // workers)

    @property
    def rank_threads(self) -> int:
        """Of each rank of the trainer."""
        return max(1, self.compute_threads // self.ranks)

    @property
    def trainer_device(self) -> str:
        """Several workers take the first GPUs, and the trainer the next one, unless it is named.
        Several ranks have variables for this."""
        if self.server_workers == 1 or self.ranks > 1 or not self.on_gpu or ":" in self.device:
            return self.device
        return f"cuda:{self.server_workers}"

    @model_validator(mode="after")
    def _fill_sizes(self) -> Self:
        """Give the options of `RunSizes` the values that the run uses. `model_fields_set` still
        names only the options that the user has given."""
        if self.starts_all:
            self.__dict__.update(vars(self._sizes_of(self.task)))
        share = "gpu_memory_utilization"
        has_own_gpus = self.trainer_device != self.device or (self.ranks > 1 and self.on_gpu)
        if has_own_gpus and not self.starts_teacher and share not in self.model_fields_set:
            self.__dict__[share] = OWN_GPU_SHARE
        return self

    def _sizes_of(self, tasks: Sequence[str]) -> RunSizes:
        return sizes_for(
            tasks,
            self.weight_mode,
            is_tiny=self.model == TINY,
            on_gpu=self.on_gpu,
            given={name: getattr(self, name) for name in self.model_fields_set & {*SIZE_NAMES}},
        )

    def completion_limit(self, task: str) -> int | None:
        """Longest completion of one task, in tokens; None for the task's own limit."""
        return self.max_completion_tokens or self._sizes_of([task]).max_completion_tokens

    def given(self, service: str) -> dict[str, Any]:
        """The options of this service that the user has given, by field."""
        names = self.model_fields_set & VIEWS[service].model_fields.keys()
        names -= {name.removeprefix(f"{service}.") for name in OWN_MEANING}
        names -= {"world_size"} | ({"resume"} if self.starts_all else set())
        return {name: getattr(self, name) for name in names}

    def resolved(self) -> dict[str, Any]:
        """What was given, and what follows from it. Without the directories, as this configuration
        can be used for another run, and without --on-end and --on-alert, which may hold secrets."""
        # In lora_only, which may read this later, the interval of restarts counts if it is given.
        sizes = {*SIZE_NAMES} - {"vllm_restart_interval"} if self.starts_all else set()
        own = (OWN | self.model_fields_set | sizes) - {"run_dir", "resume", "on_end", "on_alert"}
        own -= (
            PairOptions.model_fields.keys() if self.starts_all else NEEDS_TASK
        ) - self.model_fields_set
        values = {name: getattr(self, name) for name in type(self).model_fields if name in own}
        if self.starts_all:
            values |= {"dtype": self.weights_dtype, "eager": self.starts_eager}
            if not self.weight_mode.trains_adapter:
                del values["lora_target_modules"]
        return {
            name: value
            for name, value in values.items()
            if value not in (None, "", ()) or (value == "" and name in self.model_fields_set)
        }
