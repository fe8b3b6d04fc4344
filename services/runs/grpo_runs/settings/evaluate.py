"""Options of `grpo-eval`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, SecretStr, field_validator

from grpo_core.security import usable_token
from grpo_core.settings import Command, CommaSeparated, Given, Mistake, Shown
from grpo_core.settings.machine import not_writable
from grpo_core.settings.sources import read_file
from grpo_core.weights.directory_checks import UnusableWeights
from grpo_runs.models import (
    BASE,
    EvaluatedModel,
    adapter_flags,
    default_max_model_len,
    evaluated_model,
    without_adapter,
)
from grpo_runs.run_directory import RunDirectory
from grpo_runs.service_options import (
    ENV,
    SERVER,
    mistakes_in,
    options_by_service,
    service_words,
    words_of_sections,
)
from grpo_runs.settings.services import HUB_OR_SMOLLM2, ServerOptions, each_once

_CHECKPOINTS = "checkpoints"


def config_of_run(model: Path) -> Path | None:
    """The configuration of the run that wrote this model or adapter; None if it is in no run."""
    config = RunDirectory(model.parent.parent).config
    return config if model.parent.name == _CHECKPOINTS and config.is_file() else None


def add_options_of_run(
    given: dict[str, Given],
    config: Path,
    fields: Collection[str],
    service_options: str,
    own: Collection[str],
) -> None:
    """Add the values of `fields` that are not given, and in front of `service_options` those of
    the environment.

    Args:
        own: options of the environment that the command sets, so the run's values do not count

    Raises:
        ValueError: the configuration cannot be read.
    """
    try:
        words, options = words_of_sections(read_file(config)[0])
    except ValueError as error:
        raise ValueError(f"{error}; pass --task") from None
    for field in fields:
        value = options.get(field.replace("_", "-"))
        if field not in given and value is not None:
            given[field] = Given(value, f"{config}: {field}")
    of_environment = options_by_service(words).get(ENV, {})
    kept = {f"{ENV}.{name}": found for name, found in of_environment.items() if name not in own}
    if kept:
        later = given.get(service_options)
        all_words = [*service_words(kept), *(later.value if later else ())]
        given[service_options] = Given(all_words, f"{config}: {ENV}")


SAMPLES = 8
CPU_KV_CACHE_MIB = 1024
_FROM_THE_RUN = ("task", "data", "max_completion_tokens")
_OF_ENV_SERVER = f"{ENV}: env-server: "


def all_cores() -> int:
    return os.cpu_count() or 1


class EvalSettings(ServerOptions):
    """Measures a model on the test items of a task: starts an inference server, samples and grades
    answers, and prints success rates and mean rewards with their 95 % intervals. grpo-eval needs no
    Redis.

    With --baseline, grpo-eval evaluates a second model on the same items, and prints the lift.

    To set any further option of a service, put the service's name in front: --server.block-size 32
    (options of vllm-api-server and vLLM), --env.format-reward 0.1 (options of env-server)."""

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
        passes_on="service_options",
    )
    services: ClassVar[tuple[str, ...]] = (SERVER, ENV)
    sets_too: ClassVar[Mapping[str, frozenset[str]]] = {
        ENV: frozenset(f"eval-{name}" for name in ("items", "samples", "temperature", "output")),
    }

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
    task: Annotated[
        CommaSeparated[str],
        AfterValidator(each_once),
        Shown(default="those of the run, if --model is in the directory of a run"),
    ] = Field(
        (),
        description="Tasks of env-server, separated by commas. Without this option, the tasks, the "
        "data, the token limit and the --env options of the run apply",
    )
    data: Annotated[str | None, Shown(default="by task")] = Field(
        None,
        min_length=1,
        description="Data set, as env-server accepts it: its test items are evaluated",
    )
    items: int = Field(
        200,
        ge=1,
        description="Largest number of test items. Fewer items are evaluated if the "
        "data set has fewer",
    )
    seed: int = Field(0, ge=0, description="Random seed: chooses the test items, if there are more")
    samples: Annotated[int | None, Shown(default=f"{SAMPLES}; with --greedy 1")] = Field(
        None, ge=1, description="Number of answers to each item"
    )
    greedy: bool = Field(
        False, description="One answer to each item, of the most likely token at each position"
    )
    temperature: Annotated[float | None, Shown(default="1.0, as in training")] = Field(
        None, gt=0, allow_inf_nan=False, description="Sampling temperature"
    )
    max_completion_tokens: Annotated[int | None, Shown(default="by task")] = Field(
        None, ge=1, description="Longest answer, in tokens. Longer answers are cut off and graded"
    )
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
    gpu_memory_utilization: float = Field(
        0.9, gt=0, lt=1, description="Fraction of the GPU's memory that the server may use"
    )
    compute_threads: Annotated[int, Shown(default="the number of cores")] = Field(
        default_factory=all_cores,
        ge=1,
        description="Number of CPU threads that the server computes with",
    )
    server_deadline_s: float = Field(
        1800.0, gt=0, description="Seconds to wait for the inference server to start"
    )
    vllm_api_key: SecretStr | None = Field(
        None, description="API key that clients must send to the inference server"
    )

    _usable_token = field_validator("vllm_api_key")(usable_token)

    @field_validator("ks")
    @classmethod
    def _at_least_one_answer(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(k < 1 for k in value):
            raise ValueError("expected whole numbers, at least 1")
        return tuple(sorted(value))

    @property
    def answers(self) -> int:
        return 1 if self.greedy else self.samples or SAMPLES

    @property
    def sampling_temperature(self) -> float:
        return 0.0 if self.greedy else self.temperature or 1.0

    @property
    def served_length(self) -> int:
        """Longest sequence that the server accepts."""
        return self.max_model_len or default_max_model_len(self._served)

    @property
    def served_kv_cache_mib(self) -> int | None:
        return self.kv_cache_mib or (None if self.on_gpu else CPU_KV_CACHE_MIB)

    @property
    def _served(self) -> str:
        return self.evaluated().served

    def evaluated(self) -> EvaluatedModel:
        """Raises `UnusableWeights`."""
        return evaluated_model(self.model, self.base_model)

    def compared_with(self) -> EvaluatedModel | None:
        """Raises `UnusableWeights`."""
        if self.baseline == BASE:
            return without_adapter(self.evaluated())
        return evaluated_model(self.baseline, self.base_model) if self.baseline else None

    @classmethod
    def drop_unused(cls, given: dict[str, Given], environment: Mapping[str, str]) -> Iterator[str]:
        """Without --task, take the options of the run that the model belongs to."""
        yield from super().drop_unused(given, environment)
        model = given.get("model")
        config = config_of_run(Path(str(model.value))) if model else None
        if config and "task" not in given:
            own = {name.replace("_", "-") for name in cls.model_fields} | cls.sets_too[ENV]
            add_options_of_run(given, config, _FROM_THE_RUN, "service_options", own)
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
        yield from super().mistakes()

    def _machine_mistakes(self) -> Iterator[Mistake]:
        if problem := not_writable(self.output.absolute().parent):
            yield Mistake("output", problem)
        for name, of in (("model", self.evaluated), ("baseline", self.compared_with)):
            try:
                found = of()
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

    def env_words(self, task: str, served: str) -> list[str]:
        """Options of `env-server TASK evaluate`, except for the server's URL and the output."""
        return [
            *(task, "evaluate"),
            *("--model", served),
            *(("--data", self.data) if self.data else ()),
            *("--eval-items", str(self.items)),
            *("--eval-samples", str(self.answers)),
            *("--eval-temperature", f"{self.sampling_temperature:g}"),
            *(
                ("--max-completion-tokens", str(self.max_completion_tokens))
                if self.max_completion_tokens
                else ()
            ),
            *("--seq-len", str(self.served_length)),
            *("--seed", str(self.seed)),
            *("--log-level", self.log_level),
        ]

    def _words_for(self, service: str) -> tuple[list[str], Mapping[str, str]]:
        if service == SERVER:
            return ["--model", self._served, "--redis-url", "none", "--no-share-weights"], {}
        return self.env_words(self.task[0], self._served), {}

    def _mistakes_of_services(self) -> Iterator[Mistake]:
        """env-server checks tasks and data in any case, before a server starts for nothing."""
        given = self.options_of(SERVER)
        if given:
            for message in mistakes_in(SERVER, given, *self._words_for(SERVER)):
                yield Mistake(None, message)
        for task in self.task:
            words = self.env_words(task, self._served)
            for message in mistakes_in(ENV, self.options_of(ENV), words):
                own = message.removeprefix(_OF_ENV_SERVER).replace("TASK:", f"--task {task}:", 1)
                yield Mistake(None, own)
