"""Options of `grpo-demo`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, SecretStr, field_validator

from grpo_core.redis.keys import is_run_id
from grpo_core.security import usable_token
from grpo_core.settings import Command, CommaSeparated, Mistake, Shown
from grpo_core.settings.machine import missing_data, not_writable, unusable_model
from grpo_core.weights import bridge_config
from grpo_runs.defaults import BY_TASK, SIZE_NAMES, RunSizes, name_of_task, sizes_for
from grpo_runs.modes import ADAPTER_OPTIONS, HandOff, WeightOptions
from grpo_runs.run_directory import RUNS, RunDirectory, unusable
from grpo_runs.service_options import ENV, SERVER, SERVICES, TRAINER, mistakes_in
from grpo_runs.settings.services import HUB_OR_SMOLLM2, ServerOptions, each_once

TINY_MODEL = "tiny-model"
_PLACEHOLDER_URL = "redis://127.0.0.1:6379/0"
"""Options are checked before the tiny model is made and before Redis has a port."""
_HIDDEN = re.compile(r"^# (?:(trainer|server|env): )?([\w.-]+):? \*\*\*$", re.MULTILINE)
"""A line of config.yaml for an option with a secret: its service, if any, and its name."""
"""The line in the config.yaml of a run that had a token."""


def half_the_cores() -> int:
    """Server and trainer compute at the same time, so each gets half."""
    return max(1, (os.cpu_count() or 1) // 2)


class DemoSettings(ServerOptions, WeightOptions):
    """Trains a model with GRPO on this machine and shows the progress: starts Redis, run-api, the
    inference server, the trainer and environments as local processes. grpo-demo needs no GPU, no
    container and no model hub.

    To set any further option of a service, put the service's name in front:
    --trainer.max-staleness 4 (options of grpo), --server.block-size 32 (options of vllm-api-server
    and vLLM), --env.temperature 0.7 (options of env-server)."""

    command: ClassVar[Command] = Command(
        prog="grpo-demo",
        env_prefix="GRPO_DEMO_",
        groups={
            "Run": ("steps", "seed", "run_dir", "resume"),
            "Task": ("task", "data", "group_size", "max_completion_tokens", "eval_every"),
            "Model": ("model", "dtype", "device", "seq_len"),
            "Weights": ("mode", "vllm_restart_interval", "adapter_sync_interval"),
            "Adapter in lora_only and lora_restart": ADAPTER_OPTIONS,
            "Training": (
                "batch_size",
                "gradient_accumulation_steps",
                "lr",
                "warmup_steps",
                "max_batches_offpolicy",
            ),
            "Inference server": (
                "max_model_len",
                "kv_cache_mib",
                "eager",
                "gpu_memory_utilization",
            ),
            "Processes": ("compute_threads", "redis_appendfsync", "run_api_token"),
            "Deadlines": (
                "step_deadline_s",
                "server_deadline_s",
                "start_deadline_s",
                "model_deadline_s",
            ),
            "Logging": ("report", "log_level"),
        },
        examples=(
            "grpo-demo --steps 20",
            "grpo-demo --task my.py:reward --data rows.jsonl",
            "grpo-demo --model ./model --task gsm8k --data ./gsm8k --dry-run",
            "grpo-demo --resume runs/latest --steps 500",
        ),
        aliases={
            "model-name": "model",
            "weight-bridge-mode": "mode",
            "training-steps": "steps",
        },
        passes_on="service_options",
    )
    services: ClassVar[tuple[str, ...]] = SERVICES
    sets_too: ClassVar[Mapping[str, frozenset[str]]] = {
        # It reads this file, and looks for environments by these names.
        TRAINER: frozenset({"metrics-file", "rollouts-dir"}),
        ENV: frozenset({"wandb-name", "env.wandb-name", "eval-output", "env.eval-output"}),
    }

    model: Annotated[str | None, Shown(default="a tiny model, made on first use")] = Field(
        None, min_length=1, description=f"Model: a directory, {HUB_OR_SMOLLM2}"
    )
    run_dir: Annotated[Path | None, Shown(default="runs/<UTC time>-<seed>")] = Field(
        None, description="New or empty directory for the files of the run"
    )
    resume: Path | None = Field(
        None,
        description="Resume the run in this directory, for example runs/latest. Command-line "
        "options override the directory's config.yaml. To continue a run that has finished, "
        "raise --steps",
    )
    task: Annotated[CommaSeparated[str], AfterValidator(each_once)] = Field(
        ("arithmetic",),
        min_length=1,
        description="Task: arithmetic (one-digit sums), gsm8k or math (both need --data), your own "
        "reward (my.py:reward) or task (my.py:MyTask), or several of them, separated by commas. "
        "Each task gets its own environment",
    )
    data: str | None = Field(
        None,
        min_length=1,
        description="Data set: a file such as rows.jsonl, a directory that contains train.jsonl, "
        "or an id on the Hugging Face hub",
    )
    eval_every: Annotated[int | None, Shown(default="before and after the run")] = Field(
        None,
        ge=0,
        description="Evaluate the policy on held-out items after this number of steps, and before "
        "and after the run. 0: never",
    )
    report: bool = Field(
        True, description="Write report.html, a page to read the rollouts of the run"
    )
    seed: int = Field(
        0, ge=0, description="Random seed of the sampling, the order of the data and the training"
    )
    steps: Annotated[
        int | None,
        Shown(
            default="250; gsm8k: 60; at most 60 with --model, and in modes lora_restart and none"
        ),
    ] = Field(None, ge=1, description="Number of training steps")
    batch_size: Annotated[int | None, Shown(default="64; gsm8k: 16; with --model at most 32")] = (
        Field(None, ge=1, description="Number of sequences in one forward pass (micro-batch)")
    )
    gradient_accumulation_steps: Annotated[int | None, Shown(default="2")] = Field(
        None, ge=1, description="Number of micro-batches in one training step"
    )
    group_size: int = Field(8, ge=2, description="Number of completions sampled for each prompt")
    lr: Annotated[
        float | None,
        Shown(
            default="3e-4; gsm8k: 1e-4; six times as high with an adapter; with --model: 1e-5, "
            "with an adapter 3e-4"
        ),
    ] = Field(None, gt=0, description="Peak learning rate")
    warmup_steps: int = Field(
        5, ge=0, description="Steps over which the learning rate rises linearly to its peak"
    )
    max_completion_tokens: Annotated[
        int | None,
        Shown(
            default="8; gsm8k: 32; with --model, gsm8k and reward functions on a CPU: 256; other "
            "tasks: their own limit"
        ),
    ] = Field(None, ge=1, description="Longest completion, in tokens")
    seq_len: Annotated[
        int | None, Shown(default="128; gsm8k: 1152; your own task: 256, with --model 1152")
    ] = Field(None, ge=2, description="Longest sequence (prompt and completion), in tokens")
    max_model_len: Annotated[int | None, Shown(default="512; gsm8k: 1536; at least --seq-len")] = (
        Field(None, ge=2, description="Longest sequence that the server accepts, in tokens")
    )
    kv_cache_mib: Annotated[
        int | None, Shown(default="64; gsm8k: 256; on a GPU what --gpu-memory-utilization leaves")
    ] = Field(None, ge=1, description="Size of the server's KV cache, in MiB")
    gpu_memory_utilization: float = Field(
        0.4,
        gt=0,
        lt=1,
        description="Fraction of the GPU's memory that the server may use. The trainer uses the "
        "rest",
    )
    max_batches_offpolicy: int = Field(
        1,
        ge=1,
        description="Largest number of batches that are queued or being sampled. More batches keep "
        "the trainer busier, fewer batches keep the data fresher",
    )
    step_deadline_s: Annotated[
        float | None,
        Shown(default="300; with --model: 1800; 180 more in modes lora_restart and none"),
    ] = Field(
        None,
        gt=0,
        description="The run fails if no training step ends within this number of seconds",
    )
    model_deadline_s: float = Field(
        600.0, gt=0, description="Seconds to wait until the tiny model or smollm2 is made"
    )
    server_deadline_s: Annotated[float | None, Shown(default="600; with --model: 1800")] = Field(
        None, gt=0, description="Seconds to wait for the inference server to start"
    )
    start_deadline_s: Annotated[float | None, Shown(default="300; with --model: 600")] = Field(
        None,
        gt=0,
        description="Seconds to wait for run-api, the trainer and each environment to start",
    )
    compute_threads: Annotated[int, Shown(default="half the cores")] = Field(
        default_factory=half_the_cores,
        ge=1,
        description="Number of CPU threads that the server computes with. The trainer uses the "
        "same number",
    )
    redis_appendfsync: Literal["always", "everysec"] = Field(
        "always",
        description="When Redis writes its data to the disk. always: after every change, so nothing"
        " is lost. everysec: once per second, so a killed Redis loses 1 to 2 seconds of"
        " changes",
    )
    run_api_token: SecretStr | None = Field(
        None,
        description="Access token that clients must send to run-api and to the inference server",
    )

    _usable_token = field_validator("run_api_token")(usable_token)

    @property
    def evaluates_every(self) -> int:
        """Steps between evaluations; 0: none."""
        return self.sizes.steps if self.eval_every is None else self.eval_every

    @property
    def sizes(self) -> RunSizes:
        """The options whose default depends on others."""
        return self._sizes_of(self.task)

    def _sizes_of(self, tasks: Sequence[str]) -> RunSizes:
        given = {name: getattr(self, name) for name in SIZE_NAMES}
        return sizes_for(
            tasks,
            self.weight_mode,
            is_tiny=self.model is None,
            on_gpu=self.on_gpu,
            given={name: value for name, value in given.items() if value is not None},
        )

    def completion_limit(self, task: str) -> int | None:
        """Of one task's completions, in tokens; None for the task's own limit."""
        return self.sizes.max_completion_tokens or self._sizes_of([task]).max_completion_tokens

    def resolved(self) -> dict[str, Any]:
        """Without the directories: this configuration can be used for another run."""
        values = super().resolved() | {name: getattr(self.sizes, name) for name in SIZE_NAMES}
        values["lora_target_modules"] = tuple(self.sizes.lora_target_modules) or None
        values |= {"dtype": self.weights_dtype, "eager": self.starts_eager}
        del values["run_dir"], values["resume"]
        return values

    def mistakes(self) -> Iterator[Mistake]:
        if self.data is None and "gsm8k" in self.task:
            yield Mistake(
                None,
                "gsm8k needs --data (with make: DATA=): a directory with train.jsonl, one object "
                "with question and answer per line, or a data set on the hub such as openai/gsm8k",
            )
        for task in self.task:
            if (
                len(self.task) > 1
                and [name_of_task(t) for t in self.task].count(name_of_task(task)) > 1
            ):
                yield Mistake("task", f"two tasks have the name {name_of_task(task)}")
                break

        yield from self._mistakes_of_sizes()
        if self.resume is not None and self.run_dir is not None:
            yield Mistake("run_dir", "--resume already names the run's directory; omit this option")
        yield from super().mistakes()

    def _mistakes_of_sizes(self) -> Iterator[Mistake]:
        sizes = self.sizes
        sequences = sizes.batch_size * sizes.gradient_accumulation_steps
        if sequences % self.group_size:
            yield Mistake(
                None,
                f"--group-size {self.group_size} does not divide the {sequences} sequences of a "
                f"step (--batch-size {sizes.batch_size} x --gradient-accumulation-steps "
                f"{sizes.gradient_accumulation_steps}); choose a group size that divides them",
            )
        if (sizes.max_completion_tokens or 0) >= sizes.seq_len:
            yield Mistake(
                None,
                f"--max-completion-tokens {sizes.max_completion_tokens} leaves no room for a "
                f"prompt in --seq-len {sizes.seq_len}; lower --max-completion-tokens or raise "
                "--seq-len",
            )
        if sizes.max_model_len < sizes.seq_len:
            yield Mistake(
                None,
                f"--max-model-len {sizes.max_model_len} is less than --seq-len {sizes.seq_len}, so "
                "the server would refuse prompts; raise --max-model-len or lower --seq-len",
            )

    def _machine_mistakes(self) -> Iterator[Mistake]:
        if self.model is not None and (problem := unusable_model(self.model)):
            yield Mistake("model", problem)
        if self.data and (problem := missing_data(self.data)):
            yield Mistake("data", problem)
        for task in self.task:
            yield from self._mistakes_of_task(task)
        if self.resume is None:
            if problem := not_writable(self.run_dir or RUNS):
                yield Mistake("run_dir", problem)
            elif self.run_dir is not None and (problem := unusable(self.run_dir, "--run-dir")):
                yield Mistake(None, problem)
            elif self.run_dir and not is_run_id(run_id := RunDirectory(self.run_dir).run_id):
                yield Mistake(
                    "run_dir",
                    f"the run's id would be {run_id!r}, but spaces and braces are not allowed; "
                    "choose another directory name",
                )
            return
        run = RunDirectory.of(self.resume)
        yield from self._lacking_secrets(run)
        if run.is_in_use():
            yield Mistake(None, f"--resume {self.resume}: this run is still running; stop it first")
        step = run.newest_checkpoint_step()
        if step is None:
            yield Mistake(
                None, f"--resume {self.resume}: no checkpoint in it; start a new run instead"
            )
        elif step >= self.sizes.steps:
            yield Mistake(
                None,
                f"--resume {self.resume}: all {step} steps are done; pass a larger --steps, for "
                f"example --steps {2 * step}. For its evaluation, run grpo-eval --model "
                f"{run.checkpoints / self.weight_mode.final_directory}; for its page, grpo-report "
                f"{self.resume}",
            )

    def _mistakes_of_task(self, task: str) -> Iterator[Mistake]:
        """The environment checks the name and the file itself, which takes half a second."""
        if task in BY_TASK:
            return
        words = [task, "serve", "--model", TINY_MODEL]
        for message in mistakes_in(ENV, {}, words):
            yield Mistake("task", message.removeprefix(f"{ENV}: env-server: TASK: "))

    def _lacking_secrets(self, run: RunDirectory) -> Iterator[Mistake]:
        """Options of the resumed run whose values its config.yaml does not contain."""
        for service, name in _HIDDEN.findall(run.config.read_text()):
            option = f"--{service}.{name}" if service else f"--{name}"
            is_given = name in self.options_of(service) if service else self.run_api_token
            if not is_given:
                yield Mistake(
                    None,
                    f"--resume {self.resume}: the run had {option}, and {run.config.name} does not "
                    f"contain its value; pass {option} again",
                )

    def _words_for(self, service: str) -> tuple[list[str], Mapping[str, str]]:
        hand_off = self.hand_off(_PLACEHOLDER_URL, RunDirectory(Path("run")), Path("weights.sock"))
        arguments = {
            TRAINER: hand_off.trainer_flags(),
            SERVER: hand_off.server_flags(),
            ENV: [self.task[0], "serve", "--group-size", str(self.group_size)],
        }
        model = self.model or TINY_MODEL
        return [*arguments[service], "--model", model], hand_off.environment()

    def hand_off(self, redis_url: str, run: RunDirectory, weights_socket: Path) -> HandOff:
        """How the weights of a run travel from the trainer to the server."""
        return HandOff(
            options=self,
            restart_every_steps=self.sizes.vllm_restart_interval,
            target_modules=tuple(self.sizes.lora_target_modules),
            redis_url=redis_url,
            run_id=run.run_id,
            save_path=run.checkpoints,
            weights_socket=weights_socket,
            bridge_config=run.path / bridge_config.FILE_NAME,
        )
