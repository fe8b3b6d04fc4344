"""A command's page: what it is for, its options by group, and examples."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module

from docs.generate.markdown import table
from grpo_core.settings.command import Command, CommandSettings
from grpo_core.settings.options import Option, options_of
from grpo_core.tree.sections import VIEWS, service_of

_MODULES = {
    "env-server": "grpo_env.settings",
    "grpo": "grpo_core.tree.trainer_command",
    "grpo-compare": "grpo_runs.settings.compare",
    "grpo-demo": "grpo_runs.settings.run",
    "grpo-eval": "grpo_runs.settings.evaluate",
    "grpo-provenance": "grpo_runs.settings.replay",
    "grpo-replay": "grpo_runs.settings.replay",
    "grpo-report": "grpo_runs.settings.rollouts",
    "grpo-rollouts": "grpo_runs.settings.rollouts",
    "grpo-run": "grpo_runs.settings.run",
    "grpo-sft": "grpo_runs.settings.sft",
    "grpo-watch": "grpo_runs.settings.watch",
    "run-api": "grpo_core.tree.run_api",
    "vllm-api-server": "grpo_core.tree.server",
}
"""Module of the class that describes the command."""
_PARAGRAPH = "\n\n"


def command(name: str) -> str:
    return _PARAGRAPH.join(_parts(_settings(name)))


def _settings(name: str) -> type[CommandSettings]:
    import_module(_MODULES[name])
    return next(kind for kind in _below(CommandSettings) if kind.command.prog == name)


def _below(base: type[CommandSettings]) -> Iterator[type[CommandSettings]]:
    for kind in base.__subclasses__():
        if "command" in vars(kind):
            yield kind
        yield from _below(kind)


def _parts(settings: type[CommandSettings]) -> Iterator[str]:
    command = settings.command
    yield inspect.getdoc(settings) or ""
    if command.examples:
        yield "\n".join(["```bash", *command.examples, "```"])
    first, *others = settings.__bases__
    if not others and isinstance(parent := vars(first).get("command"), Command):
        yield f"All options are those of [`{parent.prog}`]({parent.prog}.md)."
        return
    options = options_of(settings)
    grouped = {field for fields in command.groups.values() for field in fields}
    groups = {
        "Arguments": command.positional,
        **command.groups,
        "Other options" if grouped else "Options": options.keys() - grouped - {*command.positional},
    }
    for title, fields in groups.items():
        shown = [options[field] for field in options if field in fields]
        if shown:
            yield f"## {title}"
        if rows := [_row(settings, one) for one in shown if one.field not in command.brief]:
            yield table(["Option", "Value", "Default", "Meaning"], rows)
        if named := [one for one in shown if one.field in command.brief]:
            yield f"Also {', '.join(map(_link, named))}."
    yield from _notes(settings)


def _link(option: Option) -> str:
    """An option that the page of another command describes."""
    service = service_of(option.field)
    prog = VIEWS[service].command.prog if service else ""
    return f"[`--{option.name}`]({prog}.md)"


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
    return [
        f"--{name}"
        for name, alias in fields.items()
        if alias and alias.field == option.field and not _is_prefixed(command, name)
    ]


def _is_prefixed(command: Command, name: str) -> bool:
    """Whether this is a name such as `--optim.lr`, which the page explains for all options."""
    return command.sections and "." in name


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
        yield f"These options are accepted and have no effect: {names}."
