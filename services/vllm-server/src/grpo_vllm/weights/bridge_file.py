"""Announces the shared weights in `vllm_bridge_config.json` while the server runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import structlog

from grpo_core.weights.bridge_config import (
    BridgeConfig,
    BridgeConfigUnreadable,
    BridgeConfigUnwritable,
    read_bridge_config,
    write_bridge_config,
)

log = structlog.get_logger()


@contextlib.contextmanager
def announced(config: BridgeConfig, path: Path, required: bool) -> Iterator[None]:
    """The file is there inside the context, unless another server replaces it.

    Raises:
        BridgeConfigUnwritable: it is required and cannot be written.
    """
    _say_what_is_replaced(path)
    try:
        write_bridge_config(config, path)
    except BridgeConfigUnwritable as error:
        if required:
            raise
        # Trainers ask the server itself first; the file is for those on another file system.
        log.warning("going on without a bridge config", reason=str(error))
        yield
        return
    log.info("wrote the bridge config", path=str(path.absolute()))
    try:
        yield
    finally:
        _remove_own(path, config.generation)


def _say_what_is_replaced(path: Path) -> None:
    with contextlib.suppress(BridgeConfigUnreadable):
        other = read_bridge_config(path)
        log.warning(
            "replacing the bridge config of another server, or of one that was killed",
            path=str(path.absolute()),
            model=other.model,
            generation=other.generation,
            weights_socket=str(other.weights_socket),
        )


def _remove_own(path: Path, generation: str) -> None:
    with contextlib.suppress(BridgeConfigUnreadable):
        if read_bridge_config(path).generation == generation:
            path.unlink(missing_ok=True)
