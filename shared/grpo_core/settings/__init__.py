"""Settings of every command, read from its command line, the environment and a YAML file."""

from grpo_core.settings.command import Alias, Command, CommandSettings, Mistake, Shown, flag_for
from grpo_core.settings.command_line import Given
from grpo_core.settings.fields import CommaSeparated, HttpUrl, InferenceUrl, LogLevel
from grpo_core.settings.load import EXIT_USAGE, load_settings
from grpo_core.settings.resolved import resolved_yaml, without_secrets

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
    "Shown",
    "flag_for",
    "load_settings",
    "resolved_yaml",
    "without_secrets",
]
