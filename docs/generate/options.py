"""A command's page: what it is for, its options by group, and examples."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module

from docs.generate.markdown import table
from grpo_core.settings.command import CommandSettings
from grpo_core.settings.options import Option, options_of

_COMMANDS = {
    "env-server": "grpo_env.config.settings:EnvServerSettings",
    "grpo": "grpo_trainer.config.cli:CommandLine",
    "grpo-compare": "grpo_local.settings:CompareSettings",
    "grpo-demo": "grpo_local.settings:DemoSettings",
    "grpo-run": "grpo_local.settings:RunSettings",
    "run-api": "grpo_api.settings:RunApiSettings",
    "vllm-api-server": "grpo_vllm.settings:ServerSettings",
}
_PARAGRAPH = "\n\n"


def command(name: str) -> str:
    return _PARAGRAPH.join(_parts(_settings(name)))


def _settings(name: str) -> type[CommandSettings]:
    module, _, attribute = _COMMANDS[name].partition(":")
    settings: type[CommandSettings] = getattr(import_module(module), attribute)
    return settings


def _parts(settings: type[CommandSettings]) -> Iterator[str]:
    command = settings.command
    yield inspect.getdoc(settings) or ""
    if command.examples:
        yield "\n".join(["```bash", *command.examples, "```"])
    options = options_of(settings)
    grouped = {field for fields in command.groups.values() for field in fields}
    groups = {
        "Arguments": command.positional,
        **command.groups,
        "Other options" if grouped else "Options": options.keys() - grouped - {*command.positional},
    }
    for title, fields in groups.items():
        if rows := [_row(settings, options[field]) for field in options if field in fields]:
            yield f"## {title}"
            yield table(["Option", "Value", "Default", "Meaning"], rows)
    yield from _notes(settings)


def _row(settings: type[CommandSettings], option: Option) -> list[str]:
    command = settings.command
    is_argument = option.field in command.positional
    names = [option.name.upper() if is_argument else f"--{option.name}"]
    names += [f"--no-{option.name}"] if option.is_flag else []
    names += _aliases(settings, option)
    variable = command.variable(option.field)
    return [
        ", ".join(f"`{name}`" for name in names),
        _value(option),
        option.default or "required",
        f"{(option.info.description or '').rstrip('.')}."
        + (f" Variable `{variable}`." if variable else ""),
    ]


def _aliases(settings: type[CommandSettings], option: Option) -> list[str]:
    command = settings.command
    fields = {name: command.alias(name) for name in command.aliases}
    return [f"--{name}" for name, alias in fields.items() if alias and alias.field == option.field]


def _value(option: Option) -> str:
    if option.is_flag:
        return "on, off"
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    return option.metavar


def _notes(settings: type[CommandSettings]) -> Iterator[str]:
    command = settings.command
    if command.env_prefix:
        yield f"Prefix of the [environment variables](index.md#variables): `{command.env_prefix}`."
    if command.without_effect:
        names = ", ".join(f"`--{name}`" for name in sorted(command.without_effect))
        yield f"These options of Atropos are accepted and have no effect: {names}."
