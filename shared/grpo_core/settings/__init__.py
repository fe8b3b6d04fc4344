"""Settings of every command, read from its command line, the environment and a YAML file."""

from grpo_core.settings.command import Alias as Alias
from grpo_core.settings.command import Command as Command
from grpo_core.settings.command import CommandSettings as CommandSettings
from grpo_core.settings.command import CommaSeparated as CommaSeparated
from grpo_core.settings.command import HttpUrl as HttpUrl
from grpo_core.settings.command import InferenceUrl as InferenceUrl
from grpo_core.settings.command import LogLevel as LogLevel
from grpo_core.settings.command import Mistake as Mistake
from grpo_core.settings.command import Shown as Shown
from grpo_core.settings.command import flag_for as flag_for
from grpo_core.settings.load import EXIT_USAGE as EXIT_USAGE
from grpo_core.settings.load import OptionsInvalid as OptionsInvalid
from grpo_core.settings.load import load_settings as load_settings
from grpo_core.settings.load import mistakes_of as mistakes_of
from grpo_core.settings.load import parsed as parsed
from grpo_core.settings.load import settings_of as settings_of
from grpo_core.settings.messages import hide_secrets as hide_secrets
from grpo_core.settings.messages import resolved_yaml as resolved_yaml
from grpo_core.settings.messages import without_secrets as without_secrets
from grpo_core.settings.sources import Given as Given
