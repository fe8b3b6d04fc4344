"""Settings of every command, read from its command line, the environment and a YAML file."""

from grpo_core.settings.command import (
    Alias,
    Command,
    CommandSettings,
    CommaSeparated,
    HttpUrl,
    InferenceUrl,
    LogLevel,
    Mistake,
    Shown,
    flag_for,
)
from grpo_core.settings.load import (
    EXIT_USAGE,
    OptionsInvalid,
    load_settings,
    mistakes_of,
    parsed,
    settings_of,
)
from grpo_core.settings.messages import hide_secrets, resolved_yaml, without_secrets
from grpo_core.settings.sources import Given

__all__ = [
    "EXIT_USAGE",
    "Alias",
    "CommaSeparated",
    "Command",
    "CommandSettings",
    "Given",
    "HttpUrl",
    "InferenceUrl",
    "LogLevel",
    "Mistake",
    "OptionsInvalid",
    "Shown",
    "flag_for",
    "hide_secrets",
    "load_settings",
    "mistakes_of",
    "parsed",
    "resolved_yaml",
    "settings_of",
    "without_secrets",
]
