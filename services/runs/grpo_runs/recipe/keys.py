"""The keys of a recipe, as `keys.yaml` lists them, and recipes: a file (YAML or TOML) with
`--config`, and flags, which win over the file."""

from __future__ import annotations

import copy
import difflib
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json

from grpo_core.errors import problems_of
from grpo_core.settings import Mistake
from grpo_core.settings.options import OF_TRL
from grpo_core.settings.sources import read_file
from grpo_runs.offline.errors import RecipeInvalid

Script = Literal["grpo", "maxent"]
"""Whose script runs: `src/grpo.py` or `src/maxent-grpo.py`."""
Owner = Literal["GRPOConfig", "ModelConfig", "ScriptArguments"]
Use = Literal["used", "without effect", "refused"]
_OWNERS: Mapping[str, Owner] = {"model": "ModelConfig", "script": "ScriptArguments"}
_USES: Mapping[str, Use] = {"idle": "without effect", "refused": "refused"}
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
        paths: keys of the offline trainer that take the value as it is
        words: the keys that each value sets; a text is the reason why the value is refused
        conditions: of `paths` and `words`, by the names that `translation.py` lists
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
    paths: tuple[str, ...] = ()
    words: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)
    conditions: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()
    alias_of: str = ""

    @property
    def shown_default(self) -> str:
        """As YAML writes it."""
        if isinstance(self.default, list):
            return f"[{', '.join(map(str, self.default))}]"
        words = {"None": "none", "True": "true", "False": "false", "": "empty"}
        return words.get(str(self.default), str(self.default))

    @property
    def is_list(self) -> bool:
        return self.kind_name.startswith("list[")

    def read(self, value: Any) -> Any:
        """A value of YAML or of the command line, as this key's type. Raises `ValueError`."""
        if value is False and (self.kind is str or self.default == "no"):
            value = "no"  # which YAML 1.1 reads as false
        elif isinstance(value, str):
            if value[:1] in ("{", "[") and (self.is_list or "dict[" in self.kind_name):
                try:
                    value = from_json(value)
                except ValueError as error:
                    raise ValueError(f"not JSON: {error}") from error
            elif self.is_list:
                value = [part.strip() for part in value.split(",") if part.strip()]
            elif value.lower() in ("none", "null") and self.default is None:
                value = None
        elif self.is_list and isinstance(value, float | int) and not isinstance(value, bool):
            value = [value]
        try:
            return TypeAdapter(self.kind, config=_LAX).validate_python(value)
        except ValidationError as error:
            raise ValueError(
                f"expected {self.kind_name}, got {value!r} ({problems_of(error)})"
            ) from error

    def refuses(self, value: Any) -> bool:
        return self.use == "refused" and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in self.harmless
        )


def _key(name: str, row: Sequence[Any], kind: Any, owner: Owner) -> Key:
    kind_name, default, use, first, *more = row
    use, _, conditions = use.partition(" if ")
    key = Key(name, kind, kind_name, default, _USES.get(use, "used"), first, owner)
    key = replace(key, conditions=frozenset(conditions.split()))
    if use == "sets":
        paths = (first,) if isinstance(first, str) else tuple(first)
        text, *names = more or [", ".join(f"`{path}`" for path in paths)]
        return replace(key, text=text, paths=paths, names=(*paths, *names))
    if use == "words":
        paths = tuple(path for found in first.values() if isinstance(found, dict) for path in found)
        words = {str(value).lower(): found for value, found in first.items()}
        return replace(key, text=more[0], words=words, names=(*paths, *more[1:]))
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
            key = _key(name, rows[main], kinds[main], _OWNERS.get(section, "GRPOConfig"))
            if main != name:
                key = replace(key, text=f"another name of `{main}`", alias_of=main)
            yield key


_TEXT = Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: the other takes 70 ms longer
KEYS = tuple(_read_keys(yaml.load(_TEXT, _LOADER)))
TABLE: Mapping[str, Key] = {key.name: key for key in KEYS}
MAIN_KEYS = tuple(key for key in KEYS if not key.alias_of)
_MAIN_NAMES = {key.name: key.alias_of or key.name for key in KEYS}
_OF_TRL = {ours.replace("-", "_"): name.replace("-", "_") for name, ours in OF_TRL.items()}
"""Keys by the options of run files with the same meaning."""


def help_lines(prog: str) -> Iterator[str]:
    """The help of the recipe scripts: every key, and what becomes of it."""
    yield f"usage: {prog} --config RECIPE.yaml [--KEY VALUE]...\n"
    yield "Trains a model as a recipe says. Flags win over the recipe."
    for use, heading in _HEADINGS.items():
        yield f"\n{heading}:"
        for key in KEYS:
            if key.use == use:
                yield f"  --{key.name} (default: {key.shown_default})"
                text = key.text.replace("`", "")
                yield textwrap.indent(textwrap.fill(text, _WIDTH - len(_INDENT)), _INDENT)


_CONFIG = "config"


@dataclass(frozen=True)
class TrainingRecipe:
    """The value of every key.

    Args:
        given: the keys that the file or the command line gives, by their main names
        mistakes: of the reading
        places: `FILE:LINE` of each key that a file gives
    """

    script: Script
    values: Mapping[str, Any]
    given: Mapping[str, Any]
    mistakes: Sequence[Mistake] = ()
    places: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def keys_in_order(self) -> list[Key]:
        """Given ones last, so that they win, unless they are off."""
        return sorted(MAIN_KEYS, key=lambda key: bool(self.given.get(key.name)))

    def require_valid(self, mistakes: Iterable[Mistake] = ()) -> None:
        """Args: mistakes: further ones, left out if their key has one already

        Raises `RecipeInvalid`, with a line for each."""
        lines: dict[str, str] = {}
        for name, text in (*self.mistakes, *mistakes):
            main = _MAIN_NAMES.get(str(name), str(name))
            place = f"{self.places[main]}: " if main in self.places else ""
            lines.setdefault(main, f"{place}{name}: {text}")
        if lines:
            raise RecipeInvalid("\n".join(lines.values()))


def read_recipe(argv: Sequence[str], script: Script = "grpo") -> TrainingRecipe:
    """Mistakes in values become part of the recipe. Raises `RecipeInvalid`: no such file."""
    mistakes: list[Mistake] = []
    flags = _flags(argv, mistakes)
    content: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name in flags.pop(_CONFIG, []):
        try:
            more, lines = read_file(Path(name))
        except ValueError as error:
            raise RecipeInvalid(f"--config: {error}") from error
        content |= {str(key): value for key, value in more.items()}
        places |= {_MAIN_NAMES.get(key, key): f"{name}:{line}" for key, line in lines.items()}
    given = _checked(content, mistakes)
    for name, words in flags.items():
        places.pop(_MAIN_NAMES.get(name, name), None)
        flags[name] = words[0] if len(words) == 1 else words
    given |= _checked(flags, mistakes)
    values = {key.name: copy.deepcopy(key.default) for key in MAIN_KEYS} | given
    return TrainingRecipe(script, values, given, mistakes, places)


def _checked(content: Mapping[str, Any], mistakes: list[Mistake]) -> dict[str, Any]:
    """Values by the main names of their keys."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        key = TABLE.get(name)
        if key is None:
            near = difflib.get_close_matches(_OF_TRL.get(name, name), TABLE, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            mistakes.append(Mistake(name, f"no such key{hint}"))
            continue
        try:
            read = key.read(value)
        except ValueError as error:
            mistakes.append(Mistake(name, str(error)))
            continue
        main = _MAIN_NAMES[name]
        if main in found and found[main] != read:
            mistakes.append(Mistake(name, f"differs from {main}, which has the same meaning"))
        if key.refuses(read):
            mistakes.append(Mistake(name, f"{read!r} is not supported: {key.text}"))
        found[main] = read
    return found


def _flags(argv: Sequence[str], mistakes: list[Mistake]) -> dict[str, Any]:
    """`--use_vllm --seed 1 --reward_funcs a b` → {"use_vllm": [True], "seed": ["1"], …}."""
    found: dict[str, list[Any]] = {}
    words: list[Any] | None = None
    for word in argv:
        if word.startswith("--"):
            name, separator, value = word[2:].partition("=")
            name = name.replace("-", "_")
            negated = name.removeprefix("no_")
            if name not in TABLE and negated in TABLE:
                found[negated], words = [False], None
                continue
            earlier = found.get(name, []) if name == _CONFIG else []
            found[name] = words = [*earlier, *([value] if separator else [])]
            words = None if separator else words
        elif words is None:
            mistakes.append(Mistake(word, "belongs to no flag"))
        else:
            words.append(word)
    if found.get(_CONFIG) == []:
        mistakes.append(Mistake("--config", "expected a file"))
        del found[_CONFIG]
    return {name: words or [True] for name, words in found.items()}


def _class_of(owner: Owner, docstring: str) -> type[Any]:
    def default(key: Key) -> Any:
        return field(default_factory=partial(copy.deepcopy, key.default))

    fields = [(key.name, key.kind, default(key)) for key in MAIN_KEYS if key.owner == owner]
    return make_dataclass(owner, fields, frozen=True, namespace={"__doc__": docstring})


ScriptArguments = _class_of("ScriptArguments", "Data sets and rewards.")
GRPOConfig = _class_of("GRPOConfig", "Training, sampling, objective, logging and the hub.")
ModelConfig = _class_of("ModelConfig", "The model and its adapter.")


class Configs(NamedTuple):
    """One recipe."""

    script: Any
    training: Any
    model: Any


def load_configs(argv: Sequence[str]) -> Configs:
    """The dataclasses of a command line such as `--config recipe.yaml --seed 1`.

    Raises `RecipeInvalid`, which lists every mistake.
    """
    recipe = read_recipe(argv)
    recipe.require_valid()

    def made(kind: Any) -> Any:
        return kind(**{name: recipe[name] for name in kind.__dataclass_fields__})

    return Configs(made(ScriptArguments), made(GRPOConfig), made(ModelConfig))
