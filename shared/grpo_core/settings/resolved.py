"""Writes a resolved configuration as YAML that `--config` accepts."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from grpo_core.settings.command import Command

_SECRET_NAME = re.compile(r"(token|key|password|secret)$", re.IGNORECASE)


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


def without_secrets(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words of a command line: those to show, and the names of options with a secret.

    `--hf-token X --seed 3` → `--seed 3` and `--hf-token`.
    """
    shown: list[str] = []
    secret: list[str] = []
    follows_secret = False
    for word in words:
        name, separator, _ = word.partition("=")
        if name.startswith("--"):
            follows_secret = _SECRET_NAME.search(name) is not None
            if follows_secret:
                secret.append(name)
        if not follows_secret:
            shown.append(word)
        elif separator:
            follows_secret = False
    return shown, secret


def _lines(name: str, value: Any) -> Iterator[str]:
    import yaml

    key = name.replace("_", "-")
    if isinstance(value, SecretStr):
        text = value.get_secret_value()
        if text != "none" and ("://" not in text or "@" in text or "?" in text):
            yield f"# {key}: ***"
            return
        value = text
    value, secrets = _split_secrets(value)
    yield from (f"# {key}: {secret} ***" for secret in secrets)
    if isinstance(value, Path):
        value = str(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    yield f"{key}: {text}"


def _split_secrets(value: Any) -> tuple[Any, list[str]]:
    """The value as YAML takes it, without options whose name is that of a secret; their names."""
    if isinstance(value, Mapping):
        secrets = [name for name in value if _SECRET_NAME.search(name)]
        return {name: held for name, held in value.items() if name not in secrets}, secrets
    if isinstance(value, tuple | list):
        if not any(isinstance(word, str) for word in value):
            return list(value), []
        return without_secrets([*value])
    if isinstance(value, str) and "--" in value:
        with contextlib.suppress(ValueError):  # not words of a shell
            shown, secrets = without_secrets(shlex.split(value))
            return (shlex.join(shown), secrets) if secrets else (value, [])
    return value, []
