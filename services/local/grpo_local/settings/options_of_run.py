"""The options of the run that wrote a model, for commands that use the model afterwards."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from grpo_core.settings import Given
from grpo_local.run_directory import RunDirectory
from grpo_local.service_options import ENV, options_by_service, service_words, words_of_sections

_CHECKPOINTS = "checkpoints"


def config_of_run(model: Path) -> Path | None:
    """The configuration of the run that wrote this model or adapter; None if it is in no run."""
    config = RunDirectory(model.parent.parent).config
    return config if model.parent.name == _CHECKPOINTS and config.is_file() else None


def add_options_of_run(
    given: dict[str, Given],
    config: Path,
    fields: Collection[str],
    service_options: str,
    own: Collection[str],
) -> None:
    """Add the values of `fields` that are not given, and in front of `service_options` those of
    the environment.

    Args:
        own: options of the environment that the command sets, so the run's values do not count

    Raises:
        ValueError: the configuration cannot be read.
    """
    words, options = words_of_sections(_read(config))
    for field in fields:
        value = options.get(field.replace("_", "-"))
        if field not in given and value is not None:
            given[field] = Given(value, f"{config}: {field}")
    of_environment = options_by_service(words).get(ENV, {})
    kept = {f"{ENV}.{name}": found for name, found in of_environment.items() if name not in own}
    if kept:
        later = given.get(service_options)
        all_words = [*service_words(kept), *(later.value if later else ())]
        given[service_options] = Given(all_words, f"{config}: {ENV}")


def _read(config: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{config}: cannot read it: {error}; pass --task") from error
    if not isinstance(content, dict):
        raise ValueError(f"{config}: expected lines such as `task: gsm8k`; pass --task")
    return content
