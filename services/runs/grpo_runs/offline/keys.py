"""The type of every key of the offline trainer, and the options of `grpo` and `env-server` that it
decides, by which messages name the key instead of the option. `conf/offline_grpo.yaml` has the
defaults and the descriptions, and Hydra composes it with the command line.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from grpo_core.settings import CommandSettings, LogLevel, Mistake, Shown
from grpo_core.settings.messages import problems_by_field
from grpo_core.settings.options import Option
from grpo_core.tree.environment import EnvironmentOptions
from grpo_core.tree.trainer_command import CommandLine

CONFIG_FILE = Path(__file__).parent / "conf" / "offline_grpo.yaml"
_NOT_KEYS = ("defaults", "hydra")
SECTIONS: Mapping[str, type[CommandSettings]] = {
    "grpo": CommandLine,
    "env_server": EnvironmentOptions,
}
"""The sections that take any option of a command."""

SamplingBackend = Literal["vllm_server", "sglang_server", "local"]
SyncMode = Literal["auto", "shared_vllm", "lora_only", "lora_restart", "none", "frozen"]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]


class Sets(NamedTuple):
    """Annotation of a key: the options that it decides, as section.option.

    same: they get its value
    derived: its value follows from this key and from others
    """

    same: tuple[str, ...] = ()
    derived: str | None = None


def key(*same: str, derived: str | None = None, like: str | None = None, **bounds: Any) -> Any:
    """A field with the bounds of an option, unless it has its own.

    Args:
        same, derived: as of `Sets`
        like: the option; without it the first one of `same`
    """
    found: Any = Field(**bounds)
    found.metadata.append(Sets(same, derived))
    if not bounds and (source := like or next(iter(same), None)):
        section, _, name = source.partition(".")
        of = SECTIONS[section].model_fields[name].metadata
        found.metadata += [one for one in of if not isinstance(one, Shown)]
    return found


class Section(BaseModel, frozen=True, extra="forbid"):
    """Keys below one name."""


class ModelKeys(Section):
    train_id: str = key("grpo.model", "env_server.model")
    ref_id: str = key(derived="grpo.reference_model", like="grpo.model")
    device: str = key("grpo.device")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = key(derived="grpo.dtype")


class GenerationKeys(Section):
    backend: SamplingBackend
    base_url: str = key("grpo.inference_url", "env_server.inference_url")
    batch_size: int = key(derived="env_server.max_concurrent_groups", ge=1)
    max_new_tokens: int = key("env_server.max_completion_tokens")
    temperature: float = key("env_server.temperature")
    top_p: float = key("env_server.top_p")
    top_k: int = key("env_server.top_k")
    repetition_penalty: float = key("env_server.repetition_penalty")


class TrainKeys(Section):
    iterations: int = key(derived="grpo.steps", ge=1)
    batch_size: int = key("grpo.batch_size")
    lr: float = key("grpo.lr")
    grad_clip: float = key("grpo.max_grad_norm")
    kl_coef: float = key("grpo.kl_coef")
    entropy_coef: float = key("grpo.entropy_coef")
    grad_accum_steps: int = key("grpo.gradient_accumulation_steps")


class DataKeys(Section):
    task: str = key("env_server.task")
    problems_per_iteration: Count
    rollouts_per_problem: int = key("env_server.group_size", ge=2)
    train_seed_start: Seed
    num_train_seeds: Count


class EvalKeys(Section):
    enabled: bool
    interval: Count
    backend: SamplingBackend
    base_url: str = key(like="grpo.inference_url")
    batch_size: int = key("env_server.eval_requests")
    replicates: int = key("env_server.eval_samples")
    num_ids: int = key("env_server.eval_items")
    id_seed_start: Seed
    do_sample: bool
    max_new_tokens: int = key(like="env_server.max_completion_tokens")
    temperature: float = key(derived="env_server.eval_temperature", like="env_server.temperature")
    top_p: float = key(like="env_server.top_p")
    seed_base: Seed
    ids: Annotated[
        tuple[int | str, ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, int | str) else value),
    ]


class CheckpointKeys(Section):
    save_interval: int = key(derived="grpo.checkpoint_interval", ge=0)
    keep_last_k: int = key("grpo.keep_checkpoints")
    resume: str | None = key(derived="grpo.resume")


class WandbKeys(Section):
    enabled: bool = key("grpo.use_wandb")
    project: str = key(derived="grpo.wandb_project")
    run_name: str


class LoggingKeys(Section):
    wandb: WandbKeys
    level: LogLevel = key("grpo.log_level", "env_server.log_level")


class SyncKeys(Section):
    mode: SyncMode = key(derived="grpo.mode")


class OfflineKeys(Section):
    """One run. `grpo` and `env_server` take any option of these two commands, in snake_case."""

    model: ModelKeys
    generation: GenerationKeys
    train: TrainKeys
    data: DataKeys
    eval: EvalKeys
    checkpoint: CheckpointKeys
    logging: LoggingKeys
    sync: SyncKeys
    grpo: dict[str, Any]
    env_server: dict[str, Any]
    seed: int = key("grpo.seed", "env_server.seed")

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, content: Any) -> Any:
        given = dict(leaves(content))
        filled = copy.deepcopy(_DEFAULTS)
        for path, value in given.items():
            if any(one.startswith(f"{path}.") for one in KEYS):
                raise ValueError(f"{path}: expected keys below it; got {value!r}")
            put(filled, path, value)
        for path, source in FOLLOWS.items():
            if path not in given:
                put(filled, path, value_of(filled, source))
        return filled

    @property
    def sequences_per_iteration(self) -> int:
        return self.data.problems_per_iteration * self.data.rollouts_per_problem

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of one iteration."""
        size = self.train.batch_size * self.train.grad_accum_steps
        return -(-self.sequences_per_iteration // size)


def _fields(section: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    found: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
        found |= _fields(kind, f"{prefix}{name}.") if is_section else {prefix + name: field}
    return found


KEYS: Mapping[str, FieldInfo] = _fields(OfflineKeys)
"""All keys by path, for example `train.lr`."""


def leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of each key. What a section that takes any option gives is one value."""
    for name, value in content.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and path not in KEYS:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


_DEFAULTS: dict[str, Any] = {
    name: value
    for name, value in yaml.safe_load(CONFIG_FILE.read_text(encoding="utf-8")).items()
    if name not in _NOT_KEYS
}
FOLLOWS: Mapping[str, str] = {
    path: found[1]
    for path, value in leaves(_DEFAULTS)
    if (found := re.fullmatch(r"\$\{(.+)\}", str(value)))
}
"""Keys whose default is the value of another key."""


def sets_of(field: FieldInfo) -> Sets:
    return next((one for one in field.metadata if isinstance(one, Sets)), Sets())


def mistakes_of(error: ValidationError) -> Iterator[str]:
    """One line for each mistake in the keys of a run; none for a key that only follows another."""
    options = {path: Option(path, field) for path, field in KEYS.items()}
    found = [*problems_by_field(error, options)]
    for path, message in found:
        if path is None:
            is_unknown = message.endswith(": no such key")
            yield f"{message}; conf/offline_grpo.yaml lists all keys" if is_unknown else message
        elif path not in FOLLOWS or Mistake(FOLLOWS[path], message) not in found:
            yield f"{path}: {message}"


def value_of(content: Mapping[str, Any], path: str) -> Any:
    """Look a key up by its path, for example `train.lr`."""
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


KEY_OF_OPTION: Mapping[str, str] = {
    "grpo.save_path": "hydra.run.dir",
    **{
        option: path
        for path, field in KEYS.items()
        for option in (*sets_of(field).same, sets_of(field).derived)
        if option
    },
}
"""The key that decides an option, for example `grpo.lr`. The sections `grpo` and `env_server` set
all others."""
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])")
_KEY = re.compile(
    r"(?<![\w./])(?:sync|train|generation|eval|data|model|checkpoint|logging|grpo|env_server|hydra)"
    r"\.[a-z_]+(?:\.[a-z_]+)*(?![\w(])"
)

_REPEATED = re.compile(r"(?<![\w.])([\w.]+)(?:(?:,| or| and) \1(?!\w|\.\w))+")
"""One name of a recipe that several options have, as in `--model or --tokenizer`."""


def in_keys(text: str, section: str | None = None) -> str:
    """`raise --steps` → `raise train.iterations`. Options of other commands stay.

    Args: section: of the command whose text it is
    """

    def key_of(found: re.Match[str]) -> str:
        return next(_keys_of(found[1].replace("-", "_"), section), found[0])

    return _OPTION.sub(key_of, text)


def _keys_of(option: str, section: str | None) -> Iterator[str]:
    """The names of an option, best first."""
    if section and option in SECTIONS[section].model_fields:
        name = f"{section}.{option}"
        yield KEY_OF_OPTION.get(name, name)
    names = [f"{one}.{option}" for one in SECTIONS if option in SECTIONS[one].model_fields]
    yield from (KEY_OF_OPTION[name] for name in names if name in KEY_OF_OPTION)
    yield from names


def in_recipe(text: str, names: Mapping[str, str]) -> str:
    """`raise --steps` → `raise max_steps`. Args: names: of a recipe's keys, by those of Hydra"""
    said = _KEY.sub(lambda found: names.get(found[0], found[0]), in_keys(text))
    known = {*names.values()}
    return _REPEATED.sub(lambda found: found[1] if found[1] in known else found[0], said)


def renamed(names: Mapping[str, str]) -> Callable[..., MutableMapping[str, Any]]:
    """A processor of structlog that translates the texts of an event. Args: as `in_recipe`"""

    def translated(
        _logger: Any, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        texts = {name: text for name, text in event.items() if isinstance(text, str)}
        return {**event, **{name: in_recipe(text, names) for name, text in texts.items()}}

    return translated
