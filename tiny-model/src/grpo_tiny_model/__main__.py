"""`python -m grpo_tiny_model`: makes the tiny model, or finds it in the cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import structlog
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from grpo_core.logs import configure_logging
from grpo_core.settings import CommandSettings, load_settings
from grpo_tiny_model.model import ensure_tiny_model

log = structlog.get_logger()


class _Arguments(CommandSettings):
    """Make the tiny model, or find it in the cache."""

    model_config = SettingsConfigDict(cli_prog_name="python -m grpo_tiny_model")

    directory: Path | None = Field(None, description="Where to put it (default: a cache entry)")
    path_file: Path | None = Field(None, description="File that receives the model's directory")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = load_settings(_Arguments, sys.argv[1:] if argv is None else argv)
    configure_logging("tiny-model")
    directory = ensure_tiny_model(arguments.directory)
    log.info("tiny model ready", directory=str(directory))
    if arguments.path_file is not None:
        arguments.path_file.write_text(str(directory))


if __name__ == "__main__":
    main()
