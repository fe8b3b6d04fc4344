"""The tree of a run's options: those of all services, each once, in sections."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, SecretStr

from grpo_core.service_url import ServiceUrl
from grpo_core.settings import CommandSettings, Given
from grpo_core.settings.command import Alias
from grpo_core.settings.options import options_of
from grpo_core.tree.environment import EnvironmentOptions
from grpo_core.tree.run_api import RunApiSettings
from grpo_core.tree.server import ServerSettings
from grpo_core.tree.trainer_command import CommandLine

TRAINER, SERVER, ENVIRONMENT, RUN_API = "trainer", "server", "env", "run-api"
VIEWS: Mapping[str, type[CommandSettings]] = {
    TRAINER: CommandLine,
    ENVIRONMENT: EnvironmentOptions,
    SERVER: ServerSettings,
    RUN_API: RunApiSettings,
}
"""What each service reads of the tree. An option of several is that of the first."""
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "model": ("trainer.Model", "trainer.Forward pass"),
    "task": ("env.Data", "env.Reward", "env.Agent", "env.Evaluation"),
    "sampling": ("env.Sampling", "env.Model"),
    "objective": ("trainer.Objective",),
    "teacher": ("env.Teacher",),
    "optim": ("trainer.Optimizer",),
    "weights": (
        "trainer.Weights",
        "trainer.Weights in shared_vllm",
        "trainer.Adapter in lora_only and lora_restart",
        "server.Weights",
        "server.Weights in shared_vllm",
    ),
    "queue": ("trainer.Data", "run-api.Limits", "env.Run", "env.Deadlines"),
    "server": ("trainer.Inference server", "server.Network", "server.Engine"),
    "run": ("trainer.Run", "trainer.Logging", "trainer.Processes", "env.Logging"),
}
"""The options of a section, by the headings of the services."""
SET_BY_LAUNCHER = frozenset(
    {
        *("inference_url", "weights_socket", "bridge_config_path", "weights_dir"),
        *("share_weights", "enable_lora", "max_loras", "max_lora_rank"),
    }
)
"""Options that connect trainer and server, which whoever starts both sets."""
LEFT_OUT = SET_BY_LAUNCHER | {
    *("memory_plan", "logdir", "token"),
    *("action", "answers", "output", "ready_file", "server_type", "engine_arguments"),
}
"""These, and options of other uses of the services than a run."""
NAME = "name"
"""`task: {name: my.py:reward, data: rows.jsonl}` means `task: my.py:reward` and its data."""


def sections_of(own: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The options of each section. Args: own: those that come first in it"""
    found: dict[str, tuple[str, ...]] = {}
    taken = {name for names in own.values() for name in names}
    for section, headings in SECTIONS.items():
        more = [
            name
            for service, _, title in (heading.partition(".") for heading in headings)
            for name in VIEWS[service].command.groups[title]
            if service_of(name) == service and name not in LEFT_OUT | taken
        ]
        found[section] = (*own.get(section, ()), *dict.fromkeys(more))
        taken.update(more)
    return found


def names_of(
    sections: Mapping[str, tuple[str, ...]], own: Collection[str]
) -> dict[str, str | Alias]:
    """`--optim.lr` and `--trainer.lr` for `lr`, `--env.total-steps` for an option of env-server,
    `--teacher.url` for `teacher_url`.

    Args: own: options that mean something else to every service, or to one (`server.NAME`)
    """
    found: dict[str, str | Alias] = {}
    for section, fields in sections.items():
        found |= {f"{section}.{field.replace('_', '-')}": field for field in fields}
        found |= {
            f"{section}.{field.removeprefix(f'{section}_').replace('_', '-')}": field
            for field in fields
            if field.startswith(f"{section}_")
        }
        if section in fields:
            found[f"{section}.{NAME}"] = section
    known = {field for fields in sections.values() for field in fields}
    for service, view in VIEWS.items():
        others = {name.removeprefix(f"{service}.") for name in own}
        read = [name for name in view.model_fields if name in known and name not in others]
        found |= {f"{service}.{field.replace('_', '-')}": field for field in read}
        for name in view.command.aliases:
            alias = view.command.alias(name)
            if alias and alias.field in read:
                prefix = "" if name.startswith(f"{service}.") else f"{service}."
                found.setdefault(f"{prefix}{name}", alias)
    return found


def service_of(field: str) -> str | None:
    """The service whose command describes this option; None if a run has it only."""
    return next((name for name, view in VIEWS.items() if field in view.model_fields), None)


def given_words(view: type[CommandSettings], values: Mapping[str, Any]) -> list[str]:
    """The words that give a service's command these values, by field, without those that have no
    effect. Secrets are left out, as other users can read command lines; so are URLs with a
    password, see `url_variables`."""
    given = {name: Given(value, name) for name, value in values.items() if value is not None}
    for _ in view.drop_unused(given, {}):
        pass  # the user was told
    words: list[str] = []
    for option in options_of(view).values():
        if option.field not in given or option.field in view.command.positional:
            continue
        value = given[option.field].value
        if isinstance(value, SecretStr):
            continue
        if isinstance(value, ServiceUrl) and value.userinfo:
            continue
        if isinstance(value, bool):
            words.append(f"--{option.name}" if value else f"--no-{option.name}")
        elif (text := _text(value)).startswith("--"):
            words.append(f"--{option.name}={text}")
        else:
            words += [f"--{option.name}", text]
    return words


def url_variables(view: type[CommandSettings], values: Mapping[str, Any]) -> dict[str, str]:
    """The variables that give a service's command its URLs with a password."""
    prefix = view.command.env_prefix
    return {
        view.command.variable(field) or f"{prefix}{field.upper()}": url.with_userinfo
        for field, url in values.items()
        if isinstance(url, ServiceUrl) and url.userinfo
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, tuple | list):
        parts = [
            part.model_dump(mode="json", exclude_defaults=True)
            if isinstance(part, BaseModel)
            else part
            for part in value
        ]
        return (
            json.dumps(parts)
            if any(isinstance(part, dict) for part in parts)
            else ",".join(map(str, parts))
        )
    return str(value)
