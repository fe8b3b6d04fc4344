"""Messages of the trainer and of the environment in the words of the user: the keys of Hydra or of
a recipe instead of options of `grpo` and `env-server`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from grpo_runs.offline.keys import KEYS, SECTIONS, sets_of

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
