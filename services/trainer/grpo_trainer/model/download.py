"""Downloads a model before the services start: `python -m grpo_trainer.model.download MODEL`.

Services that share a volume would otherwise all download it, or all fail with different errors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import structlog
from pydantic import Field

from grpo_core.errors import ModelNotFound
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings
from grpo_trainer.errors import UnusableSavePath

log = structlog.get_logger()

EXIT_FAILED = 1
WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files to download. The others may be a second copy of the weights in another format."""


class ModelSourceSettings(CommandSettings):
    """Makes sure that a model is available: finds its directory, or downloads it."""

    command: ClassVar[Command] = Command(
        prog="python -m grpo_trainer.model.download", positional=("model",)
    )

    model: str | None = Field(
        None, description="Model: an absolute directory or an id on the Hugging Face hub"
    )
    save_path: Path | None = Field(
        None,
        description="The trainer's --save-path. The command checks whether this directory is "
        "writable",
    )


def provide(model: str) -> Path:
    """The model's directory on this machine, downloaded if necessary.

    Raises:
        ModelNotFound: a directory without `config.json`, or the hub does not provide the model.
    """
    if not model.startswith(("/", ".")):
        return _fetched(model)
    directory = Path(model)
    if not (directory / "config.json").is_file():
        raise ModelNotFound(
            f"{model} has no config.json; name a directory with a model in transformers' "
            "format, or an id on the Hugging Face hub"
        )
    return directory


def require_writable(directory: Path) -> None:
    """Raises `UnusableSavePath` if the trainer could not save there."""
    from grpo_trainer.atomic_files import make_directory, not_writable

    probe = directory / ".write-probe"
    try:
        make_directory(directory)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise not_writable(directory, error) from error


def main(argv: Sequence[str] | None = None) -> None:
    settings = load_settings(ModelSourceSettings, sys.argv[1:] if argv is None else argv)
    configure_logging("model")
    try:
        if settings.save_path is not None:
            require_writable(settings.save_path)
        if settings.model is None:
            return
        directory = provide(settings.model)
    except (ModelNotFound, UnusableSavePath) as error:
        log.error(type(error).__name__, reason=str(error))
        raise SystemExit(EXIT_FAILED) from None
    log.info("model.ready", model=settings.model, directory=str(directory))


def _fetched(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    log.info("model.download_started", model=hub_id)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(WANTED)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"{hub_id}: cannot be downloaded ({type(error).__name__}: {error}); check the id and "
            "the network, set HF_TOKEN for a gated model (HF_TOKEN_FILE with Compose), or name a "
            "directory"
        ) from error


if __name__ == "__main__":
    main()
