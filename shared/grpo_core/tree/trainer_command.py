"""Parses the command line of `grpo`, and keeps the options of the chosen mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, Field

from grpo_core.own_code import problem_of_file
from grpo_core.settings import (
    Alias,
    Command,
    CommandSettings,
    Given,
    Mistake,
    flag_for,
    resolved_yaml,
)
from grpo_core.settings.machine import failed, missing_model, not_writable
from grpo_core.tree.common import LAST_PORT
from grpo_core.tree.objective import ObjectiveOptions
from grpo_core.tree.optim import (
    BITSANDBYTES,
    BITSANDBYTES_PIN,
    OptimizerOptions,
    ProcessOptions,
)
from grpo_core.tree.trainer import (
    AUTO,
    NEVER,
    ForwardOptions,
    RunOptions,
    ServersOptions,
    TrainerSettings,
)
from grpo_core.tree.weights import (
    KINDS,
    CheckpointRestartSettings,
    LoraOnlySettings,
    LoraRestartSettings,
    LoraSettings,
    ModeName,
    SharedVllmSettings,
)

M = TypeVar("M", bound=BaseModel)

CONFIG_FILE = "config.yaml"
"""Below --save-path: the resolved configuration."""
DEFAULT_MODE: ModeName = "none"


def _url_of_port(port: object) -> str:
    text = str(port)
    if not (text.isdecimal() and 1 <= int(text) <= LAST_PORT):
        raise ValueError(f"expected a port, 1 to {LAST_PORT}; got {text!r}")
    return f"http://127.0.0.1:{text}"


_INTERVALS = {"adapter_sync_interval", "vllm_restart_interval"}
"""Two names of one option in mode lora_only."""
COMMAND = Command(
    prog="grpo",
    env_prefix="GRPO_",
    variables={
        **{name: name.upper() for name in ServersOptions.model_fields},
        "world_size": "WORLD_SIZE",
        "trainer_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    },
    groups={
        "Model": ("model", "dtype", "device", "seq_len"),
        "Weights": (
            "mode",
            "redis_url",
            "run_id",
            "publish",
            "weight_transport",
            "publish_wait_s",
            "publish_deadline_s",
            "vllm_restart_interval",
            "adapter_sync_interval",
            "train_layer_indices",
        ),
        "Weights in shared_vllm": (
            "weights_socket",
            "vllm_control_url",
            "vllm_config_path",
            "pause_lease_s",
            "verify_every_steps",
        ),
        "Adapter in lora_only and lora_restart": tuple(
            name for name in LoraSettings.model_fields if name != "mode"
        ),
        "Data": (
            "run_api_url",
            "run_api_token",
            "max_staleness",
            "batch_deadline_s",
            "environment_return_deadline_s",
        ),
        "Optimizer": (
            "steps",
            "batch_size",
            "gradient_accumulation_steps",
            "tokens_per_micro_batch",
            *(name for name in OptimizerOptions.model_fields if name != "fsdp"),
        ),
        "Objective": tuple(ObjectiveOptions.model_fields),
        "Forward pass": tuple(ForwardOptions.model_fields),
        "Inference server": (
            "inference_url",
            *ServersOptions.model_fields,
            "vllm_api_key",
            "service_deadline_s",
            "server_return_deadline_s",
            "vllm_gpu",
            "gpu_memory_utilization",
            "max_model_len",
            "vllm_flags",
        ),
        "Run": (
            "memory_plan",
            "seed",
            "save_path",
            "checkpoint_interval",
            "keep_checkpoints",
            "state_interval",
            "resume",
        ),
        "Logging": (
            "log_level",
            "metrics_file",
            "metrics_port",
            "metrics_host",
            "tensorboard_dir",
            "report_to",
            "keep_rollouts",
            "rollouts_dir",
            "benchmark",
            "use_wandb",
            "wandb_project",
            "wandb_group",
            "wandb_key_file",
        ),
        "Processes": ("fsdp", *ProcessOptions.model_fields),
    },
    examples=(
        "grpo --model Qwen/Qwen2.5-0.5B-Instruct --mode shared_vllm --steps 100",
        "REDIS_URL=redis://:password@db:6379 grpo --model ./model --mode lora_restart --dry-run",
    ),
    aliases={
        "model-name": "model",
        "weight-bridge-mode": "mode",
        "training-steps": "steps",
        "atropos-url": "run_api_url",
        "vllm-url": "inference_url",
        "surrogate": "loss",
        "vllm-port": Alias("inference_url", _url_of_port, yields=True),
        "vllm-gpu-memory-utilization": "gpu_memory_utilization",
        "single-copy": flag_for("mode", "shared_vllm"),
        "debug-loading": flag_for("log_level", "DEBUG"),
    },
    without_effect=frozenset({"log-dir", "fused-step", "head-kernel"}),  # of grpo-run and 0.1.0
)


class CommandLine(
    CommandSettings,
    SharedVllmSettings,
    LoraOnlySettings,
    LoraRestartSettings,
    CheckpointRestartSettings,
    ProcessOptions,
    RunOptions,
):
    """Trains a model with GRPO: takes batches from run-api, updates the policy and publishes the
    new weights to the inference server.

    Names of options of the archived trainer are accepted too, for example --model-name and
    --training-steps."""

    command: ClassVar[Command] = COMMAND

    mode: ModeName = Field(
        DEFAULT_MODE,
        description="Weight-sync mode, which decides how the server gets new weights. shared_vllm: "
        "trainer and server share one copy in memory. lora_only: the running server "
        "loads each new adapter. lora_restart: the engine restarts with each new "
        "adapter. none: the server loads each new model",
    )

    memory_plan: bool = Field(
        False,
        description="Print how much memory trainer and server need with these options, and whether "
        "they fit, then exit. Reads only the model's configuration",
    )

    @classmethod
    def drop_unused(cls, given: dict[str, Given], environment: Mapping[str, str]) -> Iterator[str]:
        """Options of other modes, as command lines for the archived trainer may have them."""
        del environment
        mode = str(given["mode"].value) if "mode" in given else DEFAULT_MODE
        if mode not in KINDS:
            return
        unused = []
        for field in given.keys() - KINDS[mode].model_fields:
            if modes := [name for name, kind in KINDS.items() if field in kind.model_fields]:
                unused.append(f"{given.pop(field).name} (only in mode {' or '.join(modes)})")
        if unused:
            yield f"ignored in mode {mode}: {', '.join(sorted(unused))}"
        typed = [name for name in _INTERVALS & given.keys() if given[name].name.startswith("--")]
        if mode == "lora_only" and len(typed) == 1:  # it wins over a file's, under either name
            for name in _INTERVALS - {*typed}:
                given.pop(name, None)

    def mistakes(self) -> Iterator[Mistake]:
        kind = KINDS[self.mode]
        both = self.model_fields_set >= _INTERVALS
        if both and self.adapter_sync_interval != self.vllm_restart_interval:
            problem = "differs from --vllm-restart-interval, its other name in this mode; give one"
            yield Mistake("adapter_sync_interval", problem)
        if self.master_dtype == "bfloat16" and issubclass(kind, LoraSettings):
            yield Mistake(
                "master_dtype",
                f"mode {self.mode} trains an adapter, whose master weights must be in float32",
            )
        if self.num_inference_nodes and self.mode == "shared_vllm":
            problem = "mode shared_vllm trains the memory of one server; pass 0 or another --mode"
            yield Mistake("num_inference_nodes", f"{self.num_inference_nodes}: {problem}")
        restarts = self.mode == "none" and self.publish == "restart"
        if restarts and self.weight_transport == "collective":
            problem = "collective: needs an engine that goes on; omit it, or --publish restart"
            yield Mistake("weight_transport", problem)
        yield from self.objective_conflicts()
        yield from self.optimizer_conflicts()
        waits_s = self.batch_deadline_s + self.server_return_deadline_s
        yield from self.process_conflicts(self.mode, self.device, waits_s)
        if self.fsdp and self.processes == 1:
            yield Mistake("fsdp", "needs several trainer processes; pass --ranks or --nodes")
        # Right before a publication the newest data is this old.
        oldest = self.settings().sync.publish_every_steps - 1
        if self.max_staleness is not None and self.max_staleness < oldest:
            yield Mistake(
                "max_staleness",
                f"{self.max_staleness} would drop usable data: weights are published every "
                f"{oldest + 1} steps, so groups are up to {oldest} steps old; pass {oldest} or "
                "more, or publish more often",
            )

    def start_mistakes(self) -> Iterator[Mistake]:
        yield from failed(missing_model, model=self.model, reference_model=self.reference_model)
        for name in ("loss", "advantage"):
            file, is_own, function = (getattr(self, name) or "").rpartition(":")
            if is_own and (problem := problem_of_file(Path(file), function)):
                yield Mistake(name, problem)
        if self.memory_plan:
            return
        if not self.trainer_rank:  # rank 0 writes all files, and serves the metrics
            yield from self.port_mistakes()
            yield from failed(
                not_writable,
                save_path=self.save_path,
                metrics_file=self.metrics_file and self.metrics_file.parent,
                rollouts_dir=self.rollouts_dir,
            )
            if self.resume not in (AUTO, NEVER) and not Path(self.resume).is_dir():
                yield Mistake(
                    "resume",
                    f"no such directory: {self.resume}; auto resumes from the newest checkpoint",
                )
        yield from missing_packages(self)

    def settings(self) -> TrainerSettings:
        """The settings of the chosen mode."""
        return self._part(TrainerSettings, sync=self._part(KINDS[self.mode]))

    def resolved(self) -> dict[str, Any]:
        return resolved(self.settings())

    def _part(self, kind: type[M], **parts: Any) -> M:
        held = {name: getattr(self, name) for name in kind.model_fields if name not in parts}
        return kind.model_construct(self.model_fields_set & held.keys(), **held, **parts)


def resolved(settings: TrainerSettings) -> dict[str, Any]:
    """Options by name, such that reading them again gives the same settings."""
    held = dict(settings) | dict(settings.sync)
    del held["sync"]
    # These count as given by being there.
    if "gpu_memory_utilization" not in settings.model_fields_set:
        del held["gpu_memory_utilization"]
    if settings.sync.mode == "lora_only":
        held["adapter_sync_interval"] = settings.sync.publish_every_steps
        del held["vllm_restart_interval"]
    elif settings.sync.uses_files:
        held["vllm_restart_interval"] = settings.sync.publish_every_steps
    return held


def config_yaml(settings: TrainerSettings) -> str:
    """The content of `<save path>/config.yaml`, which `grpo --config` accepts."""
    return resolved_yaml(COMMAND, resolved(settings))


def missing_packages(options: RunOptions) -> Iterator[Mistake]:
    """One mistake for each option whose package is not installed. Nothing is imported."""
    needs = {
        "optimizer": (options.optimizer == "adamw_8bit", BITSANDBYTES, BITSANDBYTES_PIN),
        "tensorboard_dir": (options.tensorboard_dir is not None, "tensorboard", "tensorboard"),
        "use_wandb": (options.use_wandb, "wandb", "wandb"),
        "report_to": ("trackio" in options.report_to, "trackio", "trackio"),
    }
    for field, (is_needed, package, source) in needs.items():
        if is_needed and find_spec(package) is None:
            value = {"optimizer": "adamw_8bit ", "report_to": "trackio "}.get(field, "")
            yield Mistake(field, f"{value}needs the package {package}: pip install {source}")
