"""`python -m grpo_tiny_model`: makes the tiny model, or finds it in the cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import structlog
from pydantic import Field

from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, Shown, load_settings
from grpo_tiny_model.model import ensure_tiny_model
from grpo_tiny_model.recipe import Recipe

log = structlog.get_logger()


class _Arguments(CommandSettings):
    """Makes the tiny model, or finds it in the cache."""

    command: ClassVar[Command] = Command(prog="python -m grpo_tiny_model")

    directory: Annotated[Path | None, Shown(default="an entry of the cache")] = Field(
        None,
        description="Directory of the tiny model, a small model for demos and tests. If the "
        "directory is empty or missing, the command creates the model in it",
    )
    tools: bool = Field(
        False,
        description="The model calls a calculator, for examples/calculator.py, instead of adding "
        "one-digit numbers",
    )
    path_file: Path | None = Field(
        None, description="File into which the command writes the path of the model's directory"
    )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = load_settings(_Arguments, sys.argv[1:] if argv is None else argv)
    configure_logging("tiny-model")
    directory = ensure_tiny_model(arguments.directory, Recipe(tools=arguments.tools))
    log.info("tiny_model.ready", directory=str(directory))
    if arguments.path_file is not None:
        arguments.path_file.write_text(str(directory))


if __name__ == "__main__":
    main()
