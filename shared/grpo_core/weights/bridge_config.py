"""Reads and writes `vllm_bridge_config.json`, through which a trainer finds the shared memory.

The server writes the file when it starts to share its weights, and removes it when it ends. The
trainer then receives the memory through the unix socket that the file names.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from grpo_core.errors import GrpoError, problems_of
from grpo_core.weights.shared_memory import ParameterMapping

FILE_NAME = "vllm_bridge_config.json"
COMMON_DIRECTORY = Path("/tmp/atropos_bridge")
"""A fallback place, shared by all users of the host. Any of them may have created it."""

_MAX_FILE_BYTES = 64 * 1024 * 1024


class BridgeConfig(BaseModel, frozen=True, extra="ignore"):
    """The content of the file.

    `param_mappings`: name of each tensor in the checkpoint → its region in the shared memory of
    `total_bytes`. `generation` changes at every engine start.
    """

    model: str
    dtype: str
    generation: str
    weights_socket: Path
    total_bytes: int
    device: str
    param_mappings: dict[str, ParameterMapping]


class BridgeConfigNotFound(GrpoError):
    """No vllm_bridge_config.json is usable. The message lists each path with its problem."""


class BridgeConfigUnreadable(GrpoError):
    """A vllm_bridge_config.json is not usable. The message gives the reason."""


class BridgeConfigUnwritable(GrpoError):
    """vllm_bridge_config.json cannot be written to the requested path."""


def write_bridge_config(config: BridgeConfig, path: Path) -> None:
    """Write the file atomically, with mode 0600. A symbolic link at `path` is replaced.

    Raises:
        BridgeConfigUnwritable: the directory is not writable, or others could replace the file.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_foreign_directory(path.parent)
        _replace(path, config.model_dump_json(indent=2).encode())
    except OSError as error:
        raise BridgeConfigUnwritable(
            f"cannot write {path}: {error.strerror or error}; choose another path with "
            "--bridge-config-path, VLLM_BRIDGE_CONFIG_PATH or LOGDIR"
        ) from error


def find_bridge_config(
    explicit: Path | None, environment: Mapping[str, str], generation: str | None
) -> BridgeConfig:
    """Read the first usable file: `explicit`, $LOGDIR, working directory, `COMMON_DIRECTORY`.

    Args:
        generation: of the running engine; None accepts any.

    Raises:
        BridgeConfigNotFound: no file is usable.
    """
    problems = []
    log_directory = environment.get("LOGDIR")
    candidates = [
        explicit,
        Path(log_directory) / FILE_NAME if log_directory else None,
        Path(FILE_NAME),
        COMMON_DIRECTORY / FILE_NAME,
    ]
    for path in dict.fromkeys(one.absolute() for one in candidates if one is not None):
        try:
            config = read_bridge_config(path)
        except BridgeConfigUnreadable as error:
            problems.append(f"{path}: {error}")
            continue
        if generation is None or config.generation == generation:
            return config
        problems.append(
            f"{path}: of generation {config.generation}, which another or an earlier engine shared"
        )
    wanted = f" of generation {generation}" if generation else ""
    raise BridgeConfigNotFound(
        f"Could not find {FILE_NAME}{wanted}. Checked:\n  " + "\n  ".join(problems) + "\n"
        "Start vllm-api-server with --share-weights (VLLM_ENABLE_SHARED_WEIGHTS=1) on this host, "
        "with the trainer's LOGDIR, or pass the path of the file as --vllm-config-path"
    )


def read_bridge_config(path: Path) -> BridgeConfig:
    """Raises `BridgeConfigUnreadable`: missing, unreadable, another user's, or invalid."""
    try:
        # The socket that another user's file names would belong to that user, too.
        if path.parent == COMMON_DIRECTORY and not _is_trusted(path.lstat().st_uid):
            raise PermissionError(1, f"{path} belongs to another user (uid {path.lstat().st_uid})")
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES)
        return BridgeConfig.model_validate(json.loads(content))
    except FileNotFoundError:
        raise BridgeConfigUnreadable("the file does not exist") from None
    except OSError as error:
        raise BridgeConfigUnreadable(
            f"the file cannot be read: {error.strerror or error}"
        ) from error
    except ValidationError as error:
        raise BridgeConfigUnreadable(
            f"the file has invalid fields: {problems_of(error)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BridgeConfigUnreadable(f"the file is not JSON: {error}") from error


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_foreign_directory(directory: Path) -> None:
    """Raises `PermissionError` if another user could redirect or replace the file."""
    link = directory.lstat()
    if stat.S_ISLNK(link.st_mode) and not _is_trusted(link.st_uid):
        raise PermissionError(1, f"{directory} is a symbolic link that belongs to another user")
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(1, f"every user can replace the files in {directory}")


def _is_trusted(uid: int) -> bool:
    return uid in (os.geteuid(), 0)
