"""The keys of a recipe as dataclasses, made from the table. `src/configs.py` offers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from grpo_offline.recipe.key import Key, Owner
from grpo_offline.recipe.reading import read_recipe
from grpo_offline.recipe.table import KEYS


def _class_of(owner: Owner, docstring: str) -> type[Any]:
    keys = [key for key in KEYS if key.owner == owner and not key.alias_of]
    made = make_dataclass(owner, [(key.name, key.kind, _field(key)) for key in keys], frozen=True)
    made.__doc__ = docstring
    return made


def _field(key: Key) -> Any:
    metadata = {"help": key.text, "use": key.use}
    if isinstance(key.default, tuple | dict | list):
        content = key.default
        make = dict if isinstance(content, dict) else list
        return field(default_factory=lambda: make(content), metadata=metadata)
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
