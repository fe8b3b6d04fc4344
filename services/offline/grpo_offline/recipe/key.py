"""One key of a recipe: its type, its default, and what becomes of it here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_core.errors import problems_of

Owner = Literal["GRPOConfig", "ModelConfig", "ScriptArguments"]
Use = Literal["used", "without effect", "refused"]
_LAX = ConfigDict(coerce_numbers_to_str=True)


@dataclass(frozen=True)
class Key:
    """A row of the table.

    Args:
        kind: its Python type
        default: TRL 1.16.0's, where `text` says nothing else
        text: used: the keys or options that it sets. Otherwise: the reason
        path: the key of the offline trainer that takes the value as it is; "" if a rule decides
        harmless: of a refused key: values, besides the default, that ask for nothing
        alias_of: the key that this is another name of
    """

    name: str
    kind: Any
    default: Any
    use: Use
    text: str
    path: str = ""
    harmless: tuple[Any, ...] = ()
    alias_of: str = ""
    owner: Owner = "GRPOConfig"

    @property
    def kind_name(self) -> str:
        return self.kind.__name__ if isinstance(self.kind, type) else str(self.kind)

    @property
    def shown_default(self) -> str:
        """As YAML writes it."""
        if isinstance(self.default, tuple):
            return f"[{', '.join(map(str, self.default))}]"
        words = {None: "none", True: "true", False: "false", "": "empty"}
        is_word = self.default is None or isinstance(self.default, bool) or self.default == ""
        return words[self.default] if is_word else str(self.default)

    def read(self, value: Any) -> Any:
        """A value of YAML or of the command line, as this key's type. Raises `ValueError`."""
        if isinstance(value, str) and self._holds_sections and value[:1] in "{[":
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"{self.name}: not JSON: {error}") from error
        if isinstance(value, str) and self.is_list:
            value = [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, str) and value.lower() in ("none", "null") and self.default is None:
            value = None
        try:
            return _adapter(self.kind_name, self.name).validate_python(value)
        except ValidationError as error:
            raise ValueError(
                f"{self.name}: expected {self.kind_name}, got {value!r} ({problems_of(error)})"
            ) from error

    @property
    def is_list(self) -> bool:
        return self.kind_name.startswith("list[")

    @property
    def _holds_sections(self) -> bool:
        return "dict[" in self.kind_name or self.is_list

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether a refused key may have this value."""
        said = tuple(value) if isinstance(value, list) else value
        return any(
            said == one and isinstance(said, bool) == isinstance(one, bool)
            for one in (self.default, *self.harmless)
        )


@cache
def _adapter(_kind_name: str, name: str) -> TypeAdapter[Any]:
    from grpo_offline.recipe.table import TABLE

    return TypeAdapter(TABLE[name].kind, config=_LAX)


def used(name: str, kind: Any, default: Any, path: str, text: str = "") -> Key:
    """A key whose value the key `path` takes as it is."""
    return Key(name, kind, default, "used", text or f"`{path}`", path)


def ruled(name: str, kind: Any, default: Any, text: str) -> Key:
    """A key that `translation` applies by a rule. Args: text: the keys or options it sets"""
    return Key(name, kind, default, "used", text)


def idle(name: str, kind: Any, default: Any, reason: str) -> Key:
    """A key without effect."""
    return Key(name, kind, default, "without effect", reason)


def refused(name: str, kind: Any, default: Any, reason: str, *harmless: Any) -> Key:
    return Key(name, kind, default, "refused", reason, harmless=harmless)


def alias(name: str, of: Key, note: str = "") -> Key:
    return replace(
        of, name=name, text=f"another name of `{of.name}`{note}", path="", alias_of=of.name
    )


def owned_by(owner: Owner, keys: Iterable[Key]) -> Iterator[Key]:
    for key in keys:
        yield replace(key, owner=owner)
