"""Reads a recipe: a YAML file with `--config`, and flags, which win over the file."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_runs.offline.errors import RecipeInvalid
from grpo_runs.recipe.keys import KEYS, TABLE, Key, Owner

ENVIRONMENT = "env"
"""Section of the file with variables for the process."""
_CONFIG, _NEGATED = "config", "no_"
_WITH_NO = "include_num_input_tokens_seen"
_SHARDED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "accelerate's FSDP; write `fsdp: full_shard` in the recipe",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def rank_count(environment: Mapping[str, str]) -> int:
    """Number of the training processes that accelerate or torchrun has started.

    Raises `RecipeInvalid`: accelerate shards the model."""
    for variable, name in _SHARDED.items():
        if environment.get(variable, "").lower() == "true":
            raise RecipeInvalid(
                f"{variable}: the trainer does not use {name}; pass the --config_file "
                "recipes/accelerate_configs/ranks.yaml"
            )
    return int(environment.get("WORLD_SIZE", "1"))


def is_leader(environment: Mapping[str, str]) -> bool:
    """Whether this rank samples, publishes and writes the files of the run."""
    return environment.get("RANK", "0") == "0"


@dataclass(frozen=True)
class TrainingRecipe:
    """The value of every key.

    Args:
        given: the keys that the file or the command line gives, by their main names
        variables: for the process's environment
    """

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    variables: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def gives(self, *names: str) -> bool:
        return any(name in self.given for name in names)

    @property
    def without_effect(self) -> list[str]:
        """A line per given key that changes nothing."""
        keys = (TABLE[name] for name in self.given)
        return [f"{key.name}: {key.text}" for key in keys if key.use == "without effect"]


def read_recipe(argv: Sequence[str]) -> TrainingRecipe:
    """Raises `RecipeInvalid`, which lists every mistake."""
    flags, problems = _flags(argv)
    content: dict[str, Any] = {}
    for file in flags.pop(_CONFIG, []):
        content |= _file(Path(file))
    variables = content.pop(ENVIRONMENT, None) or {}
    if not isinstance(variables, Mapping):
        problems.append(f"{ENVIRONMENT}: expected a section with variables")
        variables = {}
    words = {name: words[0] if len(words) == 1 else words for name, words in flags.items()}
    given = _main_names(content, problems) | _main_names(words, problems)
    if problems:
        raise RecipeInvalid("; ".join(problems))
    values = {key.name: copy.deepcopy(key.default) for key in KEYS if not key.alias_of}
    return TrainingRecipe(values | given, given, {str(k): str(v) for k, v in variables.items()})


def _main_names(content: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Checked values by the main names of their keys."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        key = TABLE.get(name)
        if key is None:
            problems.append(_unknown(name))
            continue
        try:
            read = key.read(value)
        except ValueError as error:
            problems.append(str(error))
            continue
        main = key.alias_of or name
        if main in found and found[main] != read:
            problems.append(f"{name}: differs from {main}, which has the same meaning")
        if key.use == "refused" and not key.asks_for_nothing(read):
            problems.append(f"{name}: {read!r} is not supported: {key.text}")
        found[main] = read
    return found


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, TABLE, 1)
    return f"{name}: no such key" + (f"; did you mean {near[0]}?" if near else "")


def _flags(argv: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """`--use_vllm --seed 1 --reward_funcs a b` → {"use_vllm": [True], "seed": ["1"], …}."""
    found: dict[str, list[Any]] = {}
    problems: list[str] = []
    words: list[Any] | None = None
    for word in argv:
        if word.startswith("--"):
            name, separator, value = word[2:].partition("=")
            name = name.replace("-", "_")
            negated = name.removeprefix(_NEGATED)
            if name not in TABLE and negated != name and negated in TABLE:
                found[negated], words = [False], None
                continue
            earlier = found.get(name, []) if name == _CONFIG else []
            found[name] = words = [*earlier, *([value] if separator else [])]
            words = None if separator else words
        elif words is None:
            problems.append(f"{word!r} belongs to no flag")
        else:
            words.append(word)
    if found.get(_CONFIG) == []:
        problems.append("--config: expected a file")
        del found[_CONFIG]
    for values in found.values():
        if not values:
            values.append(True)
    return found, problems


def _file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeInvalid(f"--config {path}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise RecipeInvalid(f"--config {path}: expected one key per line, for example `seed: 42`")
    # YAML 1.1 reads `no` as false, which `eval_strategy: no` does not mean.
    words = {name for name in content if str(name).endswith("_strategy")} | {_WITH_NO}
    return {
        str(name): "no" if value is False and name in words else value
        for name, value in content.items()
    }


def _class_of(owner: Owner, docstring: str) -> type[Any]:
    keys = [key for key in KEYS if key.owner == owner and not key.alias_of]
    made = make_dataclass(owner, [(key.name, key.kind, _field(key)) for key in keys], frozen=True)
    made.__doc__ = docstring
    return made


def _field(key: Key) -> Any:
    metadata = {"help": key.text, "use": key.use}
    if isinstance(key.default, dict | list):
        return field(default_factory=lambda: copy.deepcopy(key.default), metadata=metadata)
    return field(default=key.default, metadata=metadata)


ScriptArguments = _class_of("ScriptArguments", "Data sets and rewards.")
GRPOConfig = _class_of("GRPOConfig", "Training, sampling, objective, logging and the hub.")
ModelConfig = _class_of("ModelConfig", "The model and its adapter.")


@dataclass(frozen=True)
class Configs:
    """One recipe."""

    script: Any
    training: Any
    model: Any


def load_configs(argv: Sequence[str]) -> Configs:
    """The dataclasses of a command line such as `--config recipe.yaml --seed 1`.

    Raises `RecipeInvalid`, which lists every mistake.
    """
    values = read_recipe(argv).values
    return Configs(*(_made(kind, values) for kind in (ScriptArguments, GRPOConfig, ModelConfig)))


def _made(kind: type[Any], values: Any) -> Any:
    return kind(**{name: values[name] for name in kind.__dataclass_fields__})
