"""The keys of the offline trainer by section."""

from __future__ import annotations

import re
from typing import Any

from docs.generate.markdown import table
from grpo_runs.offline.keys import (
    CONFIG_FILE,
    FOLLOWS,
    KEYS,
    SECTIONS,
    OfflineKeys,
    in_keys,
    sets_of,
    value_of,
)

OPTION = re.compile(r"Option --(?P<name>\S+) of (?P<command>grpo|env-server)( and env-server)?\.")


def keys() -> str:
    said = descriptions()
    rows = [[f"`{path}`", _default(path), _meaning(path, said[path])] for path in KEYS]
    return table(["Key", "Default", "Meaning"], rows)


def descriptions() -> dict[str, str]:
    """The comment before each key of the file, by path."""
    found: dict[str, str] = {}
    path: list[str] = []
    said: list[str] = []
    for line in CONFIG_FILE.read_text().splitlines():
        text = line.strip()
        if text.startswith("# "):
            said.append(text.removeprefix("# "))
            continue
        if ":" in text:
            path[(len(line) - len(line.lstrip())) // 2 :] = [text.partition(":")[0]]
            found[".".join(path)] = " ".join(said)
        said = []
    return {name: found[name] for name in KEYS}


def _meaning(path: str, comment: str) -> str:
    if OPTION.fullmatch(comment) is None:
        return comment
    section, _, name = sets_of(KEYS[path]).same[0].partition(".")
    return in_keys(f"{SECTIONS[section].model_fields[name].description}.", section)


def _default(path: str) -> str:
    if source := FOLLOWS.get(path):
        return f"that of `{source}`"
    value: Any = value_of(OfflineKeys.model_validate({}).model_dump(), path)
    if value is None or value == "" or value in ((), {}):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
