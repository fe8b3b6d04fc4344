"""Writes a resolved configuration as YAML that `--config` accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from grpo_core.settings.command import Command


def resolved_yaml(command: Command, values: Mapping[str, Any]) -> str:
    """One `key: value` per line, under the headings of `--help`. Secrets become comments."""
    heading = {name: title for title, names in command.groups.items() for name in names}
    order = [name for names in command.groups.values() for name in names if name in values]
    lines: list[str] = []
    title = None
    for name in dict.fromkeys([*command.positional, *order, *values]):
        if title != heading.get(name) and (title := heading.get(name)):
            lines.append(f"# {title}")
        lines += _lines(name, values[name])
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any) -> Iterator[str]:
    import yaml

    key = name.replace("_", "-")
    if isinstance(value, SecretStr):
        text = value.get_secret_value()
        if "://" not in text or "@" in text:
            yield f"# {key}: ***"
            return
        value = text
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, Path):
        value = str(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    yield f"{key}: {text}"
