"""Options that hold several named values: `accuracy=1,format=0.3`, or a section of a YAML file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

_EXAMPLE = "expected NAME=VALUE,NAME=VALUE"


def _pairs(value: Any) -> Any:
    """`a=1,b=x` → {"a": 1, "b": "x"}; a JSON object and a mapping stay as they are."""
    if value is None or isinstance(value, dict):
        return value or {}
    text = str(value).strip()
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"not a JSON object: {error}") from error
    found = {}
    for pair in filter(None, text.split(",")):
        name, separator, content = pair.partition("=")
        if not separator or not name.strip():
            raise ValueError(f"{_EXAMPLE}; got {pair!r}")
        found[name.strip()] = _scalar(content.strip())
    return found


def _scalar(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _numbers(value: Any) -> Any:
    found = _pairs(value)
    for name, number in found.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{name}: expected a number; got {number!r}")
    return found


def _texts(value: Any) -> Any:
    return {name: str(text) for name, text in _pairs(value).items()}


def _validated(check: Callable[[Any], Any]) -> BeforeValidator:
    return BeforeValidator(check)


Arguments = Annotated[dict[str, Any], _validated(_pairs)]
Weights = Annotated[dict[str, float], _validated(_numbers)]
Columns = Annotated[dict[str, str], _validated(_texts)]


class MixturePart(BaseModel):
    """One task of a mixture. A value that is not given is that of `env-server` itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str = Field(min_length=1)
    name: str | None = None
    weight: float = Field(1.0, gt=0.0, allow_inf_nan=False)
    data: str | None = None
    data_config: str | None = None
    eval_data: str | None = None
    columns: Columns = Field(default_factory=dict)
    system_prompt: str | None = None
    task_args: Arguments = Field(default_factory=dict)

    @field_validator("task")
    @classmethod
    def _not_a_mixture(cls, value: str) -> str:
        if value == MIXTURE:
            raise ValueError("a mixture cannot contain a mixture")
        return value


MIXTURE = "mixture"


def _parts(value: Any) -> Any:
    """`gsm8k=0.7,arithmetic=0.3` → two parts; a list of mappings stays as it is."""
    if value is None or (isinstance(value, list | tuple) and not _is_words(value)):
        return value or ()
    text = ",".join(value) if isinstance(value, list | tuple) else value
    return [{"task": name, "weight": weight} for name, weight in _numbers(text).items()]


def _is_words(value: Any) -> bool:
    return all(isinstance(word, str) for word in value)


Mixture = Annotated[tuple[MixturePart, ...], _validated(_parts)]

SECTIONS = ("columns", "task-args", "reward-weights")
"""Options that are a section of their own in a YAML file."""


def with_sections(content: dict[str, Any]) -> dict[str, Any]:
    """The sections as single values, also those in the section `env`."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        is_section = str(key).replace("_", "-") in SECTIONS
        if isinstance(value, dict) and is_section:
            found[key] = json.dumps(value)
        elif isinstance(value, dict) and key == "env":
            found[key] = with_sections(value)
        else:
            found[key] = value
    return found
