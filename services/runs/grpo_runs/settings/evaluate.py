"""Options of `grpo-eval`: its own, and those of the services that answer and grade."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, SecretStr, field_validator

from grpo_core.security import usable_token
from grpo_core.settings import (
    Command,
    CommandSettings,
    CommaSeparated,
    Given,
    LogLevel,
    Mistake,
    Shown,
)
from grpo_core.settings.machine import not_writable
from grpo_core.settings.options import Names, options_of
from grpo_core.tree.environment import EnvironmentOptions
from grpo_core.tree.sections import ENVIRONMENT, SERVER, TRAINER
from grpo_core.tree.server import ServerSettings
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.weights.directory_checks import UnusableWeights
from grpo_runs.models import (
    BASE,
    HUB_OR_SMOLLM2,
    EvaluatedModel,
    adapter_flags,
    default_max_model_len,
    evaluated_model,
    without_adapter,
)
from grpo_runs.settings.passed_on import (
    UNKNOWN,
    by_service,
    config_of_run,
    in_sections,
    mistakes_in,
    options_of_run,
)
from grpo_runs.settings.run import GPU_CONTROL, each_once

_PASSED_ON = "service_options"
SAMPLES: int = EnvironmentOptions.model_fields["eval_samples"].default
CPU_KV_CACHE_MIB = 1024
_MAY_DIFFER = frozenset({"dtype", "gpu_memory_utilization", "log_level", "max_model_len"})
"""Options that may have another value for one service."""
_SET = {
    ENVIRONMENT: ("run_api_url", "inference_url"),
    SERVER: (
        *("host", "port", "health_port", "redis_url", "run_id", "share_weights", "weights_socket"),
        *("bridge_config_path", "weights_dir", "api_key"),
        *("enable_lora", "max_loras", "max_lora_rank"),
    ),
}
"""Options of services that nothing here stands for."""


def option_of(view: type[BaseModel], option: str, **changes: Any) -> Any:
    """The option of a service: its bounds, default and description, but for `changes`."""
    known = view.model_fields[option]
    info: Any = Field(**{"default": known.default, "description": known.description} | changes)
    info.metadata = [*known.metadata]
    return info


def all_cores() -> int:
    return os.cpu_count() or 1


class EvalSettings(CommandSettings):
    """Measures a model on the test items of a task: starts an inference server, samples and grades
    answers, and prints success rates and mean rewards with their 95 % intervals. grpo-eval needs no
    Redis.

    With --baseline, grpo-eval evaluates a second model on the same items, and prints the lift.

    To set any further option of a service, put the service's name in front: --server.block-size 32
    (options of vllm-api-server and vLLM), --env.held-out 0.1 (options of env-server)."""

    command: ClassVar[Command] = Command(
        prog="grpo-eval",
        env_prefix="GRPO_EVAL_",
        groups={
            "Models": ("model", "baseline", "base_model", "dtype", "device"),
            "Task": ("task", "data", "items", "seed"),
            "Answers": ("samples", "greedy", "temperature", "max_completion_tokens"),
            "Results": ("ks", "output"),
            "Inference server": (
                "max_model_len",
                "kv_cache_mib",
                "eager",
                "gpu_memory_utilization",
                "compute_threads",
                "server_deadline_s",
                "vllm_api_key",
            ),
            "Logging": ("log_level",),
        },
        examples=(
            "grpo-eval --model runs/latest/checkpoints/final_model --baseline ./model",
            "grpo-eval --model ./adapter --baseline base --task gsm8k --data ./gsm8k --greedy",
        ),
        aliases={"model-name": "model"},
        passes_on=_PASSED_ON,
    )

    model: str = Field(
        min_length=1,
        description="Model to evaluate: the directory of a model or of a LoRA adapter, "
        f"{HUB_OR_SMOLLM2}",
    )
    baseline: str | None = Field(
        None,
        min_length=1,
        description="Model to compare with, evaluated on the same items. base: the base model of "
        "the adapter that --model names",
    )
    base_model: Annotated[str | None, Shown(default="the one that the adapter names")] = Field(
        None, min_length=1, description="Base model of the adapter"
    )
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Shown(default="float32; on a GPU bfloat16"),
    ] = Field(None, description="Data type of the weights")
    device: str = option_of(
        TrainerSettings,
        "device",
        default="auto",
        description="Device to compute on: cpu, cuda or cuda:N. auto: a GPU if there is one, "
        "otherwise cpu",
    )
    task: Annotated[
        CommaSeparated[str],
        AfterValidator(each_once),
        Shown(default="those of the run, if --model is in the directory of a run"),
    ] = Field(
        (),
        description="Tasks of env-server, separated by commas. Without this option, the tasks, the "
        "data, the token limit and the --env options of the run apply",
    )
    data: str | None = option_of(EnvironmentOptions, "data")
    items: int = option_of(EnvironmentOptions, "eval_items")
    seed: int = Field(0, ge=0, description="Random seed: chooses the test items, if there are more")
    samples: Annotated[int | None, Shown(default=f"{SAMPLES}; with --greedy 1")] = option_of(
        EnvironmentOptions, "eval_samples", default=None
    )
    greedy: bool = Field(
        False, description="One answer to each item, of the most likely token at each position"
    )
    temperature: Annotated[float | None, Shown(default="1.0, as in training")] = option_of(
        EnvironmentOptions, "temperature", default=None
    )
    max_completion_tokens: int | None = option_of(EnvironmentOptions, "max_completion_tokens")
    ks: Annotated[CommaSeparated[int], AfterValidator(each_once), Shown(default="1,<samples>")] = (
        Field(
            (),
            description="Values of k, separated by commas: pass@k is the probability that one of k "
            "answers is right, mean@k the expected best reward of k answers",
        )
    )
    output: Path = Field(
        Path("eval.jsonl"),
        description="File to which one line per evaluation is appended. A directory of the same "
        "name, without the suffix, gets the results of each item, and the logs",
    )
    max_model_len: Annotated[int | None, Shown(default="the model's limit, at most 4096")] = Field(
        None, ge=2, description="Longest sequence (prompt and answer), in tokens"
    )
    kv_cache_mib: Annotated[
        int | None,
        Shown(default=f"{CPU_KV_CACHE_MIB}; on a GPU what --gpu-memory-utilization leaves"),
    ] = Field(None, ge=1, description="Size of the server's KV cache, in MiB")
    eager: Annotated[bool | None, Shown(default="on; on a GPU off")] = Field(
        None,
        description="Start the server sooner, without compilation and CUDA graphs. With --no-eager,"
        " the server starts later but samples faster, which saves time in long runs",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, lt=1, description="Fraction of the GPU's memory that the server may use"
    )
    compute_threads: Annotated[int, Shown(default="the number of cores")] = Field(
        default_factory=all_cores,
        ge=1,
        description="Number of CPU threads that the server computes with",
    )
    server_deadline_s: float = option_of(EnvironmentOptions, "start_deadline_s")
    vllm_api_key: SecretStr | None = option_of(EnvironmentOptions, "vllm_api_key")
    log_level: LogLevel = option_of(
        EnvironmentOptions,
        "log_level",
        description="Least severe level of the messages in the services' log files",
    )
    service_options: tuple[str, ...] = Field(
        (), description="Options for one service, such as --env.held-out 0.1 for env-server"
    )

    _usable_token = field_validator("vllm_api_key")(usable_token)

    @field_validator("ks")
    @classmethod
    def _at_least_one_answer(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(k < 1 for k in value):
            raise ValueError("expected whole numbers, at least 1")
        return tuple(sorted(value))

    @property
    def logs(self) -> Path:
        """Directory of the logs of the processes."""
        return self.output.with_suffix("") / "logs"

    @property
    def answers(self) -> int:
        return 1 if self.greedy else self.samples or SAMPLES

    @property
    def sampling_temperature(self) -> float:
        return 0.0 if self.greedy else self.temperature or 1.0

    @property
    def served_length(self) -> int:
        """Longest sequence that the server accepts."""
        return self.max_model_len or default_max_model_len(self.evaluated().served)

    @property
    def on_gpu(self) -> bool:
        return GPU_CONTROL.exists() if self.device == "auto" else self.device.startswith("cuda")

    @property
    def weights_dtype(self) -> str:
        return self.dtype or ("bfloat16" if self.on_gpu else "float32")

    @property
    def starts_eager(self) -> bool:
        return self.eager if self.eager is not None else not self.on_gpu

    @property
    def served_kv_cache_mib(self) -> int | None:
        return self.kv_cache_mib or (None if self.on_gpu else CPU_KV_CACHE_MIB)

    def evaluated(self) -> EvaluatedModel:
        """Raises `UnusableWeights`."""
        return evaluated_model(self.model, self.base_model)

    def compared_with(self) -> EvaluatedModel | None:
        """Raises `UnusableWeights`."""
        if self.baseline == BASE:
            return without_adapter(self.evaluated())
        return evaluated_model(self.baseline, self.base_model) if self.baseline else None

    def words_for(self, service: str) -> list[str]:
        """The options that are passed on to the service, as it takes them."""
        return by_service(self.service_options).get(service, [])

    def environment(self, task: str, served: str) -> dict[str, Given]:
        """Values for `env-server TASK evaluate` by its fields, under the names of the options here.
        The URL of the server and the output are left out."""
        values = {
            "task": Given(task, f"--task {task}"),
            "action": Given("evaluate", "ACTION"),
            "model": Given(served, "--model"),
            "data": Given(self.data, "--data"),
            "eval_items": Given(self.items, "--items"),
            "eval_samples": Given(self.answers, "--samples"),
            "eval_temperature": Given(self.sampling_temperature, "--temperature"),
            "max_completion_tokens": Given(self.max_completion_tokens, "--max-completion-tokens"),
            "seq_len": Given(self.served_length, "--max-model-len"),
            "seed": Given(self.seed, "--seed"),
            "log_level": Given(self.log_level, "--log-level"),
        }
        return {field: given for field, given in values.items() if given.value is not None}

    @classmethod
    def prepare_file(cls, content: dict[str, Any]) -> dict[str, Any]:
        words, rest = in_sections(content)
        return rest | ({"service-options": words} if words else {})

    def resolved(self) -> dict[str, Any]:
        values = super().resolved()
        if not self.service_options:
            del values[_PASSED_ON]
        return values

    @classmethod
    def drop_unused(cls, given: dict[str, Given], environment: Mapping[str, str]) -> Iterator[str]:
        """Without --task, take the options of the run that the model belongs to."""
        yield from super().drop_unused(given, environment)
        model = given.get("model")
        config = config_of_run(Path(str(model.value))) if model else None
        if config is None or "task" in given:
            return
        options, words = options_of_run(config, _refused(ENVIRONMENT))
        for field in ("task", "data", "max_completion_tokens"):
            if field not in given and options.get(field) is not None:
                given[field] = Given(options[field], f"{config}: {field}")
        later = given.get(_PASSED_ON, Given((), "")).value
        given[_PASSED_ON] = Given([*words, *later], str(config))
        yield f"task and options of the environment: those of {config}"

    def mistakes(self) -> Iterator[Mistake]:
        if not self.task:
            yield Mistake("task", "name the task, for example --task gsm8k")
        for name in ("samples", "temperature"):
            if self.greedy and getattr(self, name) is not None:
                yield Mistake(
                    name,
                    "--greedy samples one answer to each item, without temperature; omit this "
                    "option, or omit --greedy",
                )
        if self.ks and self.ks[-1] > self.answers:
            yield Mistake(
                "ks",
                f"expected at most {self.answers}, the number of answers to each item; got "
                f"{self.ks[-1]}; lower it, or raise --samples",
            )
        if not self.output.suffix:
            yield Mistake("output", f"expected a suffix, as in {self.output}.jsonl")
        words = by_service(self.service_options)
        for word in words.get(UNKNOWN, [])[:1]:
            yield Mistake(None, self._unexpected(word))
        for first in words.get(TRAINER, [])[:1]:
            option = f"--{TRAINER}.{first[2:].partition('=')[0]}"
            yield Mistake(None, f"{option}: grpo-eval starts no such service; omit this option")
        if SERVER in words:
            model, refused = {"model": Given(self.model, "--model")}, _refused(SERVER)
            for line in mistakes_in(SERVER, words[SERVER], ServerSettings, model, refused):
                yield Mistake(None, line)

    def _unexpected(self, word: str) -> str:
        if not word.startswith("--"):
            return f"{word!r}: unexpected; every option begins with --"
        typed = word.partition("=")[0]
        name = typed.removeprefix("--").replace("_", "-")
        return f"{typed}: {Names(self.command, options_of(type(self))).unknown(name)}"

    def start_mistakes(self) -> Iterator[Mistake]:
        """Tasks and data are checked too, before a server starts for nothing."""
        found = [*self._machine_mistakes()]
        yield from found
        if not found and not any(self.mistakes()):
            lines = [line for task in self.task for line in self._mistakes_of(task)]
            yield from (Mistake(None, line) for line in dict.fromkeys(lines))

    def _machine_mistakes(self) -> Iterator[Mistake]:
        if problem := not_writable(self.output.absolute().parent):
            yield Mistake("output", problem)
        for name, find in (("model", self.evaluated), ("baseline", self.compared_with)):
            try:
                found = find()
                adapter_flags([found] if found else [])
            except UnusableWeights as error:
                yield Mistake(name, str(error))
                return
        if self.evaluated().adapter:
            return
        if self.baseline == BASE:
            yield Mistake(
                "baseline",
                f"{self.model} is no adapter, so it has no base model; name the directory of the "
                "model before training",
            )
        if self.base_model:
            yield Mistake("base_model", f"{self.model} is no adapter; omit this option")

    def _mistakes_of(self, task: str) -> Iterator[str]:
        if find_spec("grpo_env") is None:
            yield "env-server is not installed; install services/environment"
            return
        from grpo_env.settings import EnvServerSettings

        words, refused = self.words_for(ENVIRONMENT), _refused(ENVIRONMENT)
        values = self.environment(task, self.evaluated().served)
        yield from mistakes_in(
            ENVIRONMENT, words, EnvServerSettings, values, refused, at_start=True
        )


def _refused(service: str) -> dict[str, str]:
    """Options that are not passed on, and what to do instead."""
    written = {
        f"{prefix}{name}": f"grpo-eval sets this option; write --{name.replace('_', '-')}"
        for name in EvalSettings.model_fields
        for prefix in ("", "eval_")
        if name not in _MAY_DIFFER
    }
    return written | dict.fromkeys(_SET[service], "grpo-eval sets this option itself; omit it")
