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

from grpo_core.settings import CommandSettings, Shown
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

SamplingBackend = Literal["vllm_server", "sglang_server", "local"]
SyncMode = Literal["auto", "shared_vllm", "lora_only", "lora_restart", "none", "frozen"]


@dataclass(frozen=True)
class Sets:
    """Annotation of a key: the options that it decides, as section.option.

    same: they get its value
    derived: their value follows from it and from other keys
    follows: the key whose value is the default of this one
    """

    same: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    follows: str | None = None


def key(
    *same: str,
    default: Any = ...,
    description: str | None = None,
    derived: tuple[str, ...] = (),
    follows: str | None = None,
    like: str | None = None,
    **bounds: Any,
) -> Any:
    """A field. An option gives what is not given here.

    Args:
        same, derived, follows: as of `Sets`
        like: the option; the first one of `same`, if there is one
    """
    metadata: list[Any] = [Sets(same, derived, follows)]
    if source := like or next(iter(same), None):
        section, _, name = source.partition(".")
        of = SECTIONS[section].model_fields[name]
        default = of.default if default is ... else default
        description = description or of.description
        metadata += [] if bounds else [m for m in of.metadata if not isinstance(m, Shown)]
    found: Any = Field(default, description=description, **bounds)
    found.metadata += metadata
    return found


class Section(BaseModel):
    """Keys below one name."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelKeys(Section):
    train_id: str = key("grpo.model", "env_server.model", default="Qwen/Qwen2.5-1.5B")
    ref_id: str = key(
        default="Qwen/Qwen2.5-1.5B",
        min_length=1,
        description="Reference model of the KL penalty. It is loaded only if it is needed",
        derived=("grpo.reference_model",),
        follows="model.train_id",
    )
    device: str = key("grpo.device")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = key(
        default="auto",
        description="Data type of the weights. auto: the server's",
        derived=("grpo.dtype",),
    )


class GenerationKeys(Section):
    backend: SamplingBackend = key(
        default="vllm_server",
        description="Where rollouts are sampled. local: in this process, without a server",
    )
    base_url: str = key(
        "grpo.inference_url",
        "env_server.inference_url",
        default="http://127.0.0.1:30000",
        description="URL of the server",
    )
    batch_size: int = key(
        default=4,
        ge=1,
        description="Number of concurrent requests, one for each problem",
        derived=("env_server.max_concurrent_groups",),
    )
    max_new_tokens: int = key("env_server.max_completion_tokens", default=256)
    temperature: float = key("env_server.temperature", default=0.7)
    top_p: float = key(
        "env_server.top_p",
        default=0.95,
        description="Sample from the most likely tokens that together have this probability",
    )
    top_k: int = key("env_server.top_k", default=50)
    repetition_penalty: float = key("env_server.repetition_penalty", default=1.1)


class TrainKeys(Section):
    iterations: int = key(
        default=10, ge=1, description="Number of iterations of the run", derived=("grpo.steps",)
    )
    batch_size: int = key(
        "grpo.batch_size",
        default=8,
        description="Sequences of a forward pass: it has at most this number times --seq-len "
        "tokens",
    )
    lr: float = key("grpo.lr")
    grad_clip: float = key("grpo.max_grad_norm")
    kl_coef: float = key("grpo.kl_coef", default=0.05)
    entropy_coef: float = key("grpo.entropy_coef")
    grad_accum_steps: int = key(
        "grpo.gradient_accumulation_steps",
        default=1,
        description="An optimizer step takes at most this number times --batch-size sequences. "
        "An iteration with more sequences takes several optimizer steps",
    )


class DataKeys(Section):
    task: str = key(
        "env_server.task",
        default="arithmetic",
        description="Task of the environments: a name, or my.py:reward, my.py:MyTask, mixture",
    )
    problems_per_iteration: int = key(default=4, ge=1, description="Prompts of one iteration")
    rollouts_per_problem: int = key("env_server.group_size", default=4, ge=2)
    train_seed_start: int = key(
        default=1000, ge=0, description="Seed of the first training problem"
    )
    num_train_seeds: int = key(
        default=64,
        ge=1,
        description="Number of training problems; each pass has them in another order",
    )


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, int | str) else value


class EvalKeys(Section):
    enabled: bool = key(default=True, description="Evaluate during the run")
    interval: int = key(default=1, ge=1, description="Iterations between two evaluations")
    backend: SamplingBackend = key(
        default="vllm_server",
        description="Where the answers are sampled",
        follows="generation.backend",
    )
    base_url: str = key(
        like="grpo.inference_url",
        default="http://127.0.0.1:30000",
        description="URL of the server",
        follows="generation.base_url",
    )
    batch_size: int = key(
        "env_server.eval_requests",
        default=8,
        description="Number of concurrent requests, one for each item",
    )
    replicates: int = key("env_server.eval_samples", default=4, description="Answers to each item")
    num_ids: int = key("env_server.eval_items", default=16, description="Number of items")
    id_seed_start: int = key(default=5000, ge=0, description="Seed of the first item")
    do_sample: bool = key(
        default=True,
        description="false: the most likely tokens, with one answer to each item",
    )
    max_new_tokens: int = key(
        like="env_server.max_completion_tokens",
        default=256,
        description="Longest answer, in tokens",
    )
    temperature: float = key(
        like="env_server.temperature", default=0.7, derived=("env_server.eval_temperature",)
    )
    top_p: float = key(like="env_server.top_p", default=0.95, description="As generation.top_p")
    seed_base: int = key(
        default=4242, ge=0, description="Seed of the sampling, for generation.backend=local"
    )
    ids: Annotated[tuple[int | str, ...], BeforeValidator(_several)] = key(
        default=(), description="Items: seeds, or keys of the task's items. Replaces num_ids"
    )


class CheckpointKeys(Section):
    save_interval: int = key(
        default=1,
        ge=0,
        description="Iterations between two saved models. 0: only the last one",
        derived=("grpo.checkpoint_interval",),
    )
    keep_last_k: int = key(
        "grpo.keep_checkpoints", default=3, description="Number of saved models that are kept"
    )
    resume: str | None = key(
        default=None,
        description="Directory of a run to continue. Its keys hold, but for those that are given",
        derived=("grpo.resume",),
    )


class WandbKeys(Section):
    enabled: bool = key("grpo.use_wandb")
    project: str = key(
        default="",
        description="Project. Empty: $WANDB_PROJECT, or uncategorized",
        derived=("grpo.wandb_project",),
    )
    run_name: str = key(
        default="", description="Name of the run. Empty: chosen by Weights & Biases"
    )


class LoggingKeys(Section):
    wandb: WandbKeys = WandbKeys()
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = key(
        "grpo.log_level", "env_server.log_level", default="WARNING"
    )


class SyncKeys(Section):
    mode: SyncMode = key(
        default="auto",
        description="How new weights reach the server. auto: what the server supports. frozen: they"
        " do not, and the rollouts stay those of the first weights",
        derived=("grpo.mode",),
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
    grpo: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the command grpo, for example objective: dapo",
    )
    env_server: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the command env-server, for example data: rows.jsonl",
    )
    seed: int = key(
        "grpo.seed",
        "env_server.seed",
        default=42,
        description="Seed of the run's random numbers",
    )

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
