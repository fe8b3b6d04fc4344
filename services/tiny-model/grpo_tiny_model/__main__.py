"""`python -m grpo_tiny_model`: makes the tiny model or smollm2, or finds it in the cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import structlog
from pydantic import Field

from grpo_core.cpu import prepare_cpu
from grpo_core.errors import GrpoError
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, Mistake, Shown, load_settings
from grpo_tiny_model.model import ensure_tiny_model
from grpo_tiny_model.smollm2 import ensure_smollm2
from grpo_tiny_model.spec import TinySpec

log = structlog.get_logger()

PROG = "python -m grpo_tiny_model"
EXIT_FAILED = 1


class _Arguments(CommandSettings):
    """Makes the tiny model, or SmolLM2-135M-Instruct, or finds it in the cache."""

    command: ClassVar[Command] = Command(prog=PROG)

    directory: Annotated[Path | None, Shown(default="an entry of the cache")] = Field(
        None,
        description="Directory of the model. If the directory is empty or missing, the command "
        "creates the model in it",
    )
    tools: bool = Field(
        False,
        description="The model calls a calculator, for examples/calculator.py, instead of adding "
        "one-digit numbers",
    )
    smollm2: bool = Field(
        False,
        description="Make SmolLM2-135M-Instruct, a pretrained model, from two optional packages, "
        "instead of the tiny model",
    )
    path_file: Path | None = Field(
        None, description="File into which the command writes the path of the model's directory"
    )

    def mistakes(self) -> Iterator[Mistake]:
        if self.tools and self.smollm2:
            yield Mistake("tools", "smollm2 has no such variant; omit this option, or --smollm2")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = load_settings(_Arguments, sys.argv[1:] if argv is None else argv)
    configure_logging("tiny-model")
    prepare_cpu()  # before torch is imported
    try:
        if arguments.smollm2:
            directory = ensure_smollm2(arguments.directory)
        else:
            directory = ensure_tiny_model(arguments.directory, TinySpec(tools=arguments.tools))
    except GrpoError as error:
        sys.stderr.write(f"{PROG}: {type(error).__name__}: {error}\n")
        raise SystemExit(EXIT_FAILED) from None
    log.info("model.ready", directory=str(directory))
    sys.stdout.write(f"{directory}\n")
    if arguments.path_file is not None:
        arguments.path_file.write_text(str(directory))


if __name__ == "__main__":
    main()
