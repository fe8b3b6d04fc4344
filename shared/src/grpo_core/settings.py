"""Settings from the command line and the environment, parsed before anything heavy is imported.

Order of precedence: command line, environment, default. Unknown options are refused. Flags may
be written with dashes or underscores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

EXIT_USAGE = 2

SHARED_ENVIRONMENT: Mapping[str, str] = {
    "redis_url": "REDIS_URL",
    "run_id": "RUN_ID",
    "run_api_token": "RUN_API_TOKEN",
    "vllm_api_key": "VLLM_API_KEY",
}
"""Fields that every command which has them also reads from these variables."""


class CommandSettings(BaseSettings):
    """Base of every command's settings."""

    model_config = SettingsConfigDict(
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        extra="forbid",
        populate_by_name=True,
        protected_namespaces=(),
        frozen=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Variables count only under a command's own prefix: a stray PORT or MODEL must not."""
        if settings_cls.model_config.get("env_prefix"):
            # an empty one counts as none: Compose passes on what a .env file leaves empty
            return (init_settings, EnvSettingsSource(settings_cls, env_ignore_empty=True))
        return (init_settings,)


S = TypeVar("S", bound=CommandSettings)


def load_settings(
    settings_type: type[S],
    argv: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    variables: Mapping[str, str] = MappingProxyType({}),
    from_file: Mapping[str, Any] = MappingProxyType({}),
) -> S:
    """Parse a command's settings, or end the process with status 2 and a line per mistake.

    The class names its command in `model_config["cli_prog_name"]`; `variables` maps fields to
    environment variables that keep a name of their own. Both win over `from_file`.
    """
    prog = settings_type.model_config.get("cli_prog_name")
    from_environment: dict[str, Any] = {
        field: environment[variable]
        for field, variable in {**SHARED_ENVIRONMENT, **variables}.items()
        if field in settings_type.model_fields and environment.get(variable)
    }
    try:
        return CliApp.run(
            settings_type,
            cli_args=_with_dashes(settings_type, argv),
            **{**from_file, **from_environment},
        )
    except ValidationError as error:
        for problem in error.errors():
            option = ".".join(str(part) for part in problem["loc"]).replace("_", "-")
            where = f"--{option}: " if option else ""  # none: about several of them
            sys.stderr.write(
                f"{prog}: {where}{problem['msg']} ({_given(settings_type, problem)}); "
                f"see {prog} --help\n"
            )
        raise SystemExit(EXIT_USAGE) from None


def _given(settings_type: type[CommandSettings], problem: Any) -> str:
    """The value of a mistake, unless that may be a secret."""
    secrets = {
        name
        for name, field in settings_type.model_fields.items()
        if SecretStr in (field.annotation, *get_args(field.annotation))
    }
    # a mistake of no option in particular comes with all of them
    at = set(problem["loc"][:1]) or set(settings_type.model_fields)
    return "the value is not shown" if at & secrets else f"got {problem['input']!r}"


def _with_dashes(settings_type: type[CommandSettings], argv: Sequence[str]) -> list[str]:
    """`--env.group_size=8` → `--env.group-size=8`. Values stay untouched, and so do flags that are
    not ours: a command may pass those on."""
    ours = {field.replace("_", "-") for field in settings_type.model_fields}
    return [_flag_with_dashes(word, ours) for word in argv]


def _flag_with_dashes(word: str, ours: set[str]) -> str:
    name, separator, value = word.partition("=")
    dashed = name.replace("_", "-")
    is_ours = dashed.removeprefix("--").removeprefix("no-").partition(".")[0] in ours
    return dashed + separator + value if word.startswith("--") and is_ours else word
