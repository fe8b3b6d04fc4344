"""Options of `grpo-eval`: its own, and those of the services that answer and grade."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PositiveInt

from grpo_core.cpu import CPU
from grpo_core.settings import Command, CommaSeparated, Given, LogLevel, Mistake, Shown
from grpo_core.settings.machine import not_writable
from grpo_core.settings.options import option_of
from grpo_core.settings.sources import read_file
from grpo_core.tree.common import MetricsOptions
from grpo_core.tree.environment import EnvironmentOptions
from grpo_core.tree.sections import ENVIRONMENT, LEFT_OUT, SERVER, VIEWS
from grpo_core.tree.server import ServerSettings
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.weights.directory_checks import UnusableWeights
from grpo_runs.models import (
    A_MODEL,
    BASE,
    EvaluatedModel,
    adapter_flags,
    default_max_model_len,
    evaluated_model,
)
from grpo_runs.run_directory import RunDirectory, options_in
from grpo_runs.settings.launch_options import ServerHere, each_once

SAMPLES: int = EnvironmentOptions.model_fields["eval_samples"].default
CPU_KV_CACHE_MIB = 1024


_OWN_NAMES = {
    "eval_items": "items",
    "eval_samples": "samples",
    "eval_temperature": "temperature",
    "seq_len": "max_model_len",
}
"""Options of env-server, and those that stand for them here."""
_FIELDS = tuple(dict.fromkeys([*ServerSettings.model_fields, *EnvironmentOptions.model_fields]))
_SET_HERE = LEFT_OUT.intersection(_FIELDS) | {
    *_OWN_NAMES,
    *("task", "model", "run_api_url", "run_api_token", "redis_url", "run_id", "api_key"),
    *("host", "port", "health_port", "steps", "eval_every", "eval_output"),
    *MetricsOptions.model_fields,
}
"""Options of services that grpo-eval sets itself."""
_OF_TRAINING = frozenset(
    {
        *("group_size", "temperature", "max_batches_offpolicy", "max_concurrent_groups", "seed"),
        *("drop_equal_scores", "start_completion_tokens", "curriculum", "curriculum_dir"),
        "start_deadline_s",
    }
)
"""Options below the same headings as those of items that an evaluation does not take over."""
_HEADINGS = ("Sampling", "Data", "Reward", "Agent", "Evaluation", "Deadlines")
_OF_ITEMS = (
    *("task", "tokenizer"),
    *(
        name
        for heading in _HEADINGS
        for name in EnvironmentOptions.command.groups[heading]
        if name not in _SET_HERE | _OF_TRAINING
    ),
)
"""Options of a run's environments that its evaluation must have too."""
_GROUPS = {
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
}
_SHOWN = frozenset(name for names in _GROUPS.values() for name in names)
_OF_SERVICES = tuple(name for name in _FIELDS if name not in _SET_HERE | _SHOWN)
"""Options that `--help` only names."""


def _refused() -> dict[str, str]:
    names = {
        f"{prefix}{field.replace('_', '-')}": field
        for field in _SET_HERE
        for prefix in (f"{ENVIRONMENT}.", f"{SERVER}.", "")
    }
    return {
        name: "grpo-eval sets this option; write --" + _OWN_NAMES[field].replace("_", "-")
        if field in _OWN_NAMES
        else "grpo-eval sets this option itself; omit it"
        for name, field in names.items()
        if name.replace("-", "_") not in _SHOWN
    }


def _aliases() -> dict[str, str]:
    """`--env.seed` for `seed`."""
    known = _SHOWN.union(_OF_SERVICES)
    found = {
        f"{service}.{name.replace('_', '-')}": name
        for service in (ENVIRONMENT, SERVER)
        for name in VIEWS[service].model_fields
        if name in known
    }
    of_vllm = ("dtype", "seed", "max-model-len", "gpu-memory-utilization")
    return found | {f"{SERVER}.{name}": name.replace("-", "_") for name in of_vllm}


class EvalSettings(ServerSettings, EnvironmentOptions, ServerHere):
    """Measures a model on the test items of a task: starts an inference server, samples and grades
    answers, and prints success rates and mean rewards with their 95 % intervals. grpo-eval needs no
    Redis.

    With --baseline, grpo-eval evaluates a second model on the same items, and prints the lift.

    All options of env-server and vllm-api-server apply too, with or without the service's name in
    front, for example --held-out 0.1 or --env.held-out 0.1. All other options of vLLM begin with
    --server., for example --server.block-size 32."""

    command: ClassVar[Command] = Command(
        prog="grpo-eval",
        env_prefix="GRPO_EVAL_",
        groups=_GROUPS | {"Options of env-server and vllm-api-server": _OF_SERVICES},
        examples=(
            "grpo-eval --model runs/latest/checkpoints/final_model --baseline ./model",
            "grpo-eval --model ./adapter --baseline base --task gsm8k --data ./gsm8k --greedy",
        ),
        aliases={"model-name": "model", **_aliases()},
        refused=_refused(),
        brief=frozenset(_OF_SERVICES),
        passes_on="server_options",
        passes_on_below=f"{SERVER}.",
        left_out=_SET_HERE - _SHOWN,
    )

    model: str = Field(
        min_length=1,
        description=f"Model to evaluate: the directory of a LoRA adapter, or {A_MODEL}",
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
    ] = Field(  # type: ignore[assignment]
        (),
        description="Tasks of env-server, separated by commas. Without this option, the tasks, the "
        "data, the token limit and the --env options of the run apply",
    )
    items: int = option_of(EnvironmentOptions, "eval_items")
    seed: int = Field(0, ge=0, description="Random seed: chooses the test items, if there are more")
    samples: Annotated[int | None, Shown(default=f"{SAMPLES}; with --greedy 1")] = option_of(
        EnvironmentOptions, "eval_samples", default=None
    )
    greedy: bool = Field(
        False, description="One answer to each item, of the most likely token at each position"
    )
    temperature: Annotated[float | None, Shown(default="1.0, as in training")] = option_of(  # type: ignore[assignment]
        EnvironmentOptions, "temperature", default=None
    )
    ks: Annotated[
        CommaSeparated[PositiveInt],
        AfterValidator(lambda ks: tuple(sorted({*ks}))),
        Shown(default="1,<samples>"),
    ] = Field(
        (),
        description="Values of k, separated by commas: pass@k is the probability that one of k "
        "answers is right, mean@k the expected best reward of k answers",
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
        default_factory=lambda: CPU.cores,
        ge=1,
        description="Number of CPU threads that the server computes with",
    )
    server_deadline_s: float = option_of(EnvironmentOptions, "start_deadline_s")
    log_level: LogLevel = option_of(
        EnvironmentOptions,
        "log_level",
        description="Least severe level of the messages in the services' log files",
    )
    server_options: tuple[str, ...] = ()
    """Options of vLLM."""

    @property
    def logs(self) -> Path:
        """Directory of the logs of the processes."""
        return self.output.with_suffix("") / "logs"

    @property
    def answer_count(self) -> int:
        return 1 if self.greedy else self.samples or SAMPLES

    @property
    def sampling_temperature(self) -> float:
        return 0.0 if self.greedy else self.temperature or 1.0

    @property
    def served_length(self) -> int:
        """Longest sequence that the server accepts."""
        return self.max_model_len or default_max_model_len(self.evaluated().served)

    @property
    def served_kv_cache_mib(self) -> int | None:
        return self.kv_cache_mib or (None if self.on_gpu else CPU_KV_CACHE_MIB)

    def evaluated(self) -> EvaluatedModel:
        """Raises `UnusableWeights`."""
        return evaluated_model(self.model, self.base_model)

    def compared_with(self) -> EvaluatedModel | None:
        """Raises `UnusableWeights`."""
        if self.baseline == BASE:
            served = self.evaluated().served
            return EvaluatedModel(f"{served} (base)", served)
        return evaluated_model(self.baseline, self.base_model) if self.baseline else None

    def _given(self, service: str) -> dict[str, Any]:
        """The options of this service that the user has given, by field."""
        names = self.model_fields_set & VIEWS[service].model_fields.keys() - {"temperature"}
        return {name: getattr(self, name) for name in names}

    def environment(self, task: str, served: str) -> dict[str, Any]:
        """Values for `env-server TASK evaluate` by field, without the URL and the output."""
        values = {
            **self._given(ENVIRONMENT),
            "task": task,
            "action": "evaluate",
            "model": served,
            "eval_items": self.items,
            "eval_samples": self.answer_count,
            "eval_temperature": self.sampling_temperature,
            "seq_len": self.served_length,
            "seed": self.seed,
            "log_level": self.log_level,
        }
        return {name: value for name, value in values.items() if value is not None}

    def server(self, served: str) -> dict[str, Any]:
        """Values for `vllm-api-server` by field, without its ports and what adapters need."""
        return {
            **self._given(SERVER),
            "model": served,
            "share_weights": False,
            "log_level": self.log_level,
            "engine_arguments": self.server_options,
        }

    def resolved(self) -> dict[str, Any]:
        own = {*EvalSettings.__annotations__, *ServerHere.__annotations__, *self.model_fields_set}
        own -= set() if self.server_options else {"server_options"}
        return {name: getattr(self, name) for name in type(self).model_fields if name in own}

    @classmethod
    def prepare_file(cls, content: dict[str, Any]) -> dict[str, Any]:
        return content

    @classmethod
    def drop_unused(cls, given: dict[str, Given], environment: Mapping[str, str]) -> Iterator[str]:
        """Without --task, take the options of the run that the model belongs to."""
        yield from super().drop_unused(given, environment)
        model = Path(str(given["model"].value)) if "model" in given else Path()
        run = RunDirectory(model.parent.parent)
        config = run.config
        if "task" in given or model.parent != run.checkpoints or not config.is_file():
            return
        for field, value in _options_of_run(config).items():
            if value not in (None, [], {}):
                given.setdefault(field, Given(value, f"{config}: {field}"))
        yield f"task and options of the environment: those of {config}"

    def mistakes(self) -> Iterator[Mistake]:
        if (run := RunDirectory.of(Path(self.model))).config.is_file():
            models = [path for path in run.checkpoints.glob("final_*") if path.is_dir()]
            named = models[0] if models else run.checkpoints
            yield Mistake("model", f"{self.model} is the directory of a run; write {named}")
        elif not self.task:
            yield Mistake("task", "name the task, for example --task gsm8k")
        for name in ("samples", "temperature"):
            if self.greedy and getattr(self, name) is not None:
                yield Mistake(
                    name,
                    "--greedy samples one answer to each item, without temperature; omit this "
                    "option, or omit --greedy",
                )
        if self.ks and self.ks[-1] > self.answer_count:
            yield Mistake(
                "ks",
                f"expected at most {self.answer_count}, the number of answers to each item; got "
                f"{self.ks[-1]}; lower it, or raise --samples",
            )
        if not self.output.suffix:
            yield Mistake("output", f"expected a suffix, as in {self.output}.jsonl")
        yield from self.mistakes_in(SERVER, self.server(self.model))

    def start_mistakes(self) -> Iterator[Mistake]:
        """Tasks and data are checked too, before a server starts for nothing."""
        found = [*self._machine_mistakes()]
        yield from found
        if not found and not any(self.mistakes()):
            for task in self.task:
                yield from self._mistakes_of_task(task)

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
                f"{self.model} is no adapter, so it has no base model; name that before training",
            )
        if self.base_model:
            yield Mistake("base_model", f"{self.model} is no adapter; omit this option")

    def _mistakes_of_task(self, task: str) -> Iterator[Mistake]:
        if find_spec("grpo_env") is None:
            yield Mistake(None, "env-server is not installed; install services/environment")
            return
        from grpo_env.settings import EnvServerSettings

        values = self.environment(task, self.evaluated().served)
        for one in self.mistakes_in(ENVIRONMENT, values, EnvServerSettings, _OWN_NAMES):
            yield Mistake(None, f"--task {task}: {one.message}") if one.field == "task" else one


def _options_of_run(config: Path) -> dict[str, Any]:
    """The options of a run that its evaluation must have too, by field.

    Raises:
        ValueError: the configuration cannot be read.
    """
    try:
        own = options_in(read_file(config)[0])
    except ValueError as error:
        raise ValueError(f"{error}; pass --task") from None
    found = own | options_in(own.get(ENVIRONMENT) or {})  # of runs before the sections
    return {name: found[name] for name in _OF_ITEMS if name in found}
