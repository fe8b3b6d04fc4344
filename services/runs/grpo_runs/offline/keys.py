"""Every key of the offline trainer. A key that sets an option of `grpo` or `env-server` has the
option's bounds and description, and its default unless it has one of its own.

Hydra composes `conf/offline_grpo.yaml`, which docs/generate/offline_keys.py makes, with the command
line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from grpo_core.settings import CommandSettings, LogLevel, Shown
from grpo_core.settings.messages import problems_by_field
from grpo_core.settings.options import Option
from grpo_core.tree.environment import EnvironmentOptions
from grpo_core.tree.trainer_command import CommandLine

CONFIG_FILE = Path(__file__).parent / "conf" / "offline_grpo.yaml"
SECTIONS: Mapping[str, type[CommandSettings]] = {
    "grpo": CommandLine,
    "env_server": EnvironmentOptions,
}
"""The sections that take any option of a command."""

MODEL, URL = "Qwen/Qwen2.5-1.5B", "http://127.0.0.1:30000"
SamplingBackend = Literal["vllm_server", "sglang_server", "local"]
SyncMode = Literal["auto", "shared_vllm", "lora_only", "lora_restart", "none", "frozen"]


@dataclass(frozen=True)
class Sets:
    """Annotation of a key: the options that it decides, as section.option.

    same: they get its value
    derived: its value follows from this key and from others
    follows: the key whose value is the default of this one
    """

    same: tuple[str, ...] = ()
    derived: str | None = None
    follows: str | None = None


def key(
    default: Any = ...,
    description: str | None = None,
    *,
    sets: tuple[str, ...] = (),
    derived: str | None = None,
    follows: str | None = None,
    like: str | None = None,
    **bounds: Any,
) -> Any:
    """A field. An option gives the default, the description and the bounds if they are not given
    here.

    Args:
        sets, derived, follows: as of `Sets`
        like: the option; without it the first one of `sets`
    """
    metadata: list[Any] = [Sets(sets, derived, follows)]
    if source := like or next(iter(sets), None):
        section, _, name = source.partition(".")
        option = SECTIONS[section].model_fields[name]
        default = option.default if default is ... else default
        description = description or option.description
        metadata += [] if bounds else [m for m in option.metadata if not isinstance(m, Shown)]
    found: Any = Field(default, description=description, **bounds)
    found.metadata += metadata
    return found


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, int | str) else value


class Section(BaseModel):
    """Keys below one name."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelKeys(Section):
    train_id: str = key(MODEL, sets=("grpo.model", "env_server.model"))
    ref_id: str = key(
        MODEL,
        "Reference model of the KL penalty. It is loaded only if it is needed",
        derived="grpo.reference_model",
        follows="model.train_id",
        min_length=1,
    )
    device: str = key(sets=("grpo.device",))
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = key(
        "auto", "Data type of the weights. auto: the server's", derived="grpo.dtype"
    )


class GenerationKeys(Section):
    backend: SamplingBackend = key(
        "vllm_server", "Where rollouts are sampled. local: in this process, without a server"
    )
    base_url: str = key(
        URL, "URL of the server", sets=("grpo.inference_url", "env_server.inference_url")
    )
    batch_size: int = key(
        4,
        "Number of concurrent requests, one for each problem",
        derived="env_server.max_concurrent_groups",
        ge=1,
    )
    max_new_tokens: int = key(256, sets=("env_server.max_completion_tokens",))
    temperature: float = key(0.7, sets=("env_server.temperature",))
    top_p: float = key(
        0.95,
        "Sample from the most likely tokens that together have this probability",
        sets=("env_server.top_p",),
    )
    top_k: int = key(50, sets=("env_server.top_k",))
    repetition_penalty: float = key(1.1, sets=("env_server.repetition_penalty",))


class TrainKeys(Section):
    iterations: int = key(10, "Number of iterations of the run", derived="grpo.steps", ge=1)
    batch_size: int = key(
        8,
        "Sequences of a forward pass: it has at most this number times --seq-len tokens",
        sets=("grpo.batch_size",),
    )
    lr: float = key(sets=("grpo.lr",))
    grad_clip: float = key(sets=("grpo.max_grad_norm",))
    kl_coef: float = key(0.05, sets=("grpo.kl_coef",))
    entropy_coef: float = key(sets=("grpo.entropy_coef",))
    grad_accum_steps: int = key(
        1,
        "An optimizer step takes at most this number times --batch-size sequences. An iteration "
        "with more sequences takes several optimizer steps",
        sets=("grpo.gradient_accumulation_steps",),
    )


class DataKeys(Section):
    task: str = key(
        "arithmetic",
        "Task of the environments: a name, or my.py:reward, my.py:MyTask, mixture",
        sets=("env_server.task",),
    )
    problems_per_iteration: int = key(4, "Prompts of one iteration", ge=1)
    rollouts_per_problem: int = key(4, sets=("env_server.group_size",), ge=2)
    train_seed_start: int = key(1000, "Seed of the first training problem", ge=0)
    num_train_seeds: int = key(
        64, "Number of training problems; each pass has them in another order", ge=1
    )


class EvalKeys(Section):
    enabled: bool = key(True, "Evaluate during the run")
    interval: int = key(1, "Iterations between two evaluations", ge=1)
    backend: SamplingBackend = key(
        "vllm_server", "Where the answers are sampled", follows="generation.backend"
    )
    base_url: str = key(
        URL, "URL of the server", follows="generation.base_url", like="grpo.inference_url"
    )
    batch_size: int = key(
        8,
        "Number of concurrent requests, one for each item",
        sets=("env_server.eval_requests",),
    )
    replicates: int = key(4, "Answers to each item", sets=("env_server.eval_samples",))
    num_ids: int = key(16, "Number of items", sets=("env_server.eval_items",))
    id_seed_start: int = key(5000, "Seed of the first item", ge=0)
    do_sample: bool = key(True, "false: the most likely tokens, with one answer to each item")
    max_new_tokens: int = key(
        256, "Longest answer, in tokens", like="env_server.max_completion_tokens"
    )
    temperature: float = key(
        0.7, derived="env_server.eval_temperature", like="env_server.temperature"
    )
    top_p: float = key(0.95, "As generation.top_p", like="env_server.top_p")
    seed_base: int = key(4242, "Seed of the sampling, for generation.backend=local", ge=0)
    ids: Annotated[tuple[int | str, ...], BeforeValidator(_several)] = key(
        (), "Items: seeds, or keys of the task's items. Replaces num_ids"
    )


class CheckpointKeys(Section):
    save_interval: int = key(
        1,
        "Iterations between two saved models. 0: only the last one",
        derived="grpo.checkpoint_interval",
        ge=0,
    )
    keep_last_k: int = key(
        3, "Number of saved models that are kept", sets=("grpo.keep_checkpoints",)
    )
    resume: str | None = key(
        None,
        "Directory of a run to continue. Its keys hold, but for those that are given",
        derived="grpo.resume",
    )


class WandbKeys(Section):
    enabled: bool = key(sets=("grpo.use_wandb",))
    project: str = key(
        "", "Project. Empty: $WANDB_PROJECT, or uncategorized", derived="grpo.wandb_project"
    )
    run_name: str = key("", "Name of the run. Empty: chosen by Weights & Biases")


class LoggingKeys(Section):
    wandb: WandbKeys = WandbKeys()
    level: LogLevel = key("WARNING", sets=("grpo.log_level", "env_server.log_level"))


class SyncKeys(Section):
    mode: SyncMode = key(
        "auto",
        "How new weights reach the server. auto: what the server supports. frozen: they do not, "
        "and the rollouts stay those of the first weights",
        derived="grpo.mode",
    )


class OfflineKeys(Section):
    """One run. `grpo` and `env_server` take any option of these two commands, in snake_case."""

    model: ModelKeys = ModelKeys()
    generation: GenerationKeys = GenerationKeys()
    train: TrainKeys = TrainKeys()
    data: DataKeys = DataKeys()
    eval: EvalKeys = EvalKeys()
    checkpoint: CheckpointKeys = CheckpointKeys()
    logging: LoggingKeys = LoggingKeys()
    sync: SyncKeys = SyncKeys()
    grpo: dict[str, Any] = key({}, "Options of the command grpo, for example objective: dapo")
    env_server: dict[str, Any] = key(
        {}, "Options of the command env-server, for example data: rows.jsonl"
    )
    seed: int = key(42, "Seed of the run's random numbers", sets=("grpo.seed", "env_server.seed"))

    @property
    def sequences_per_iteration(self) -> int:
        return self.data.problems_per_iteration * self.data.rollouts_per_problem

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of one iteration."""
        size = self.train.batch_size * self.train.grad_accum_steps
        return -(-self.sequences_per_iteration // size)


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def fields_of(section: type[BaseModel] = OfflineKeys, prefix: str = "") -> dict[str, FieldInfo]:
    """All keys by path, for example `train.lr`."""
    found: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        inner = fields_of(kind, f"{prefix}{name}.") if is_section(kind) else {prefix + name: field}
        found |= inner
    return found


def sets_of(field: FieldInfo) -> Sets:
    return next((one for one in field.metadata if isinstance(one, Sets)), Sets())


KEYS: Mapping[str, FieldInfo] = fields_of()


def mistakes_of(error: ValidationError) -> Iterator[str]:
    """One line for each mistake in the keys of a run."""
    options = {path: Option(path, field) for path, field in KEYS.items()}
    for path, message in problems_by_field(error, options):
        line = f"{path}: {message}" if path else message
        is_unknown = line.endswith("no such key")
        yield f"{line}; conf/offline_grpo.yaml lists all keys" if is_unknown else line


def value_of(content: Mapping[str, Any], path: str) -> Any:
    """Args: path: of a key, for example `train.lr`"""
    found: Any = content
    for name in path.split("."):
        found = found[name]
    return found


def put(content: dict[str, Any], path: str, value: Any) -> None:
    """Set a key, in sections that may be missing."""
    *sections, name = path.split(".")
    for section in sections:
        content = content.setdefault(section, {})
    content[name] = value
