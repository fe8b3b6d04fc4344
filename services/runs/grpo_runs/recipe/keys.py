"""The keys of a recipe, as `keys.yaml` lists them. The documentation and the tests read them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_core.errors import problems_of

Owner = Literal["GRPOConfig", "ModelConfig", "ScriptArguments"]
Use = Literal["used", "without effect", "refused"]
_OWNERS: Mapping[str, Owner] = {"model": "ModelConfig", "script": "ScriptArguments"}
_USES: Mapping[str, Use] = {
    "sets": "used",
    "rule": "used",
    "idle": "without effect",
    "refused": "refused",
}
_LAX = ConfigDict(coerce_numbers_to_str=True)
_WIDTH, _INDENT = 98, " " * 6
_HEADINGS: Mapping[Use, str] = {
    "used": "Keys",
    "without effect": "Keys without effect; a given one is named at the start",
    "refused": "Keys that are refused, unless they ask for nothing",
}


@dataclass(frozen=True)
class Key:
    """One key.

    Args:
        kind: its Python type, which messages call `kind_name`
        text: used: the keys or options that it sets. Otherwise: the reason
        path: the key of the offline trainer that takes the value as it is; "" if a rule decides
        names: keys of the offline trainer that messages replace with this one
        harmless: of a refused key: values that ask for nothing
        alias_of: the key that this is another name of
    """

    name: str
    kind: Any
    kind_name: str
    default: Any
    use: Use
    text: str
    owner: Owner
    path: str = ""
    names: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()
    alias_of: str = ""

    @property
    def shown_default(self) -> str:
        """As YAML writes it."""
        if isinstance(self.default, list):
            return f"[{', '.join(map(str, self.default))}]"
        words = {None: "none", True: "true", False: "false", "": "empty"}
        is_word = self.default is None or isinstance(self.default, bool) or self.default == ""
        return words[self.default] if is_word else str(self.default)

    @property
    def is_list(self) -> bool:
        return self.kind_name.startswith("list[")

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.kind, config=_LAX)

    def read(self, value: Any) -> Any:
        """A value of YAML or of the command line, as this key's type. Raises `ValueError`."""
        holds_sections = self.is_list or "dict[" in self.kind_name
        if isinstance(value, str) and holds_sections and value[:1] in "{[":
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"{self.name}: not JSON: {error}") from error
        if isinstance(value, str) and self.is_list:
            value = [part.strip() for part in value.split(",") if part.strip()]
        if self.is_list and isinstance(value, float | int) and not isinstance(value, bool):
            value = [value]
        if isinstance(value, str) and value.lower() in ("none", "null") and self.default is None:
            value = None
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(
                f"{self.name}: expected {self.kind_name}, got {value!r} ({problems_of(error)})"
            ) from error

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether a refused key may have this value."""
        return any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in self.harmless
        )


def _key(section: str, name: str, row: list[Any], kind: Any) -> Key:
    kind_name, default, use, text, *more = row
    key = Key(name, kind, kind_name, default, _USES[use], text, _OWNERS.get(section, "GRPOConfig"))
    if use == "sets":
        return replace(key, path=text, text=more[0] if more else f"`{text}`")
    if use == "refused":
        return replace(key, harmless=(default, *more))
    return replace(key, names=tuple(more))


def _read_keys(content: Mapping[str, Mapping[str, Any]]) -> Iterator[Key]:
    """In the order of the file."""
    rows = {name: row for section in content.values() for name, row in section.items()}
    hints = {name: row[0] for name, row in rows.items() if name not in content["aliases"]}
    kinds = get_type_hints(type("Kinds", (), {"__annotations__": hints}), {"Any": Any})
    for section, names in content.items():
        for name in names:
            main = rows[name] if section == "aliases" else name
            key = _key(section, name, rows[main], kinds[main])
            if main != name:
                text = f"another name of `{main}`"
                key = replace(key, text=text, path="", names=(), alias_of=main)
            yield key


_CONTENT = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8"))
KEYS = tuple(_read_keys(_CONTENT))
TABLE: Mapping[str, Key] = {key.name: key for key in KEYS}
MAXENT_NAMES = frozenset(_CONTENT["maxent"])


def help_text(prog: str) -> str:
    """The help of the recipe scripts: every key, and what becomes of it."""
    return "\n".join(_help_lines(prog)) + "\n"


def _help_lines(prog: str) -> Iterator[str]:
    yield f"usage: {prog} --config RECIPE.yaml [--KEY VALUE]..."
    yield ""
    yield "Trains a model as a recipe says. Flags win over the recipe."
    for use, heading in _HEADINGS.items():
        yield f"\n{heading}:"
        for key in KEYS:
            if key.use == use:
                yield f"  --{key.name} (default: {key.shown_default})"
                plain = key.text.replace("`", "")
                yield from textwrap.wrap(
                    plain, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT
                )
