"""Directories of weights that a trainer hands to the inference server: what must be in them, and
one number that stands for every byte.

A directory is handed off under a name of its own per version and never changed afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_core.errors import GrpoError
from grpo_core.weights.ref import WeightKind, WeightRef

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as --max-lora-rank."""
MODEL_CONFIG, MODEL_WEIGHTS_GLOB = "config.json", "*.safetensors"


class UnusableWeights(GrpoError):
    """A directory cannot be served from. Says which, why, and what to do."""


def directory_digest(directory: Path) -> str:
    """SHA-256 (hexadecimal) over the relative names, sizes and bytes of all files below it.

    Raises `OSError` where it, or a file in it, cannot be read.
    """
    total = hashlib.sha256()
    directory.stat()  # rglob finds nothing where there is none
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name = path.relative_to(directory).as_posix()
        line = f"{digest} {path.stat().st_size} {name}\n"
        total.update(line.encode(errors="surrogateescape"))  # names are bytes
    return total.hexdigest()


def check_weights(weights: WeightRef, below: Path) -> Path:
    """The directory, once everything that can be known without loading it is right.

    Args:
        weights: as they came over the wire
        below: the only directory that weights are taken from

    Raises:
        UnusableWeights: outside `below`, missing, half-written, or other bytes than were written.
    """
    directory = inside(str(weights.path), below)
    require_complete(weights.kind, directory)
    with _readable(directory):
        found = directory_digest(directory)
    if found != weights.digest:
        raise UnusableWeights(
            f"{directory}: checksum {found[:12]}…, announced {weights.digest[:12]}…; it was "
            "changed or cut off after it was written, or the server sees another directory under "
            "this path"
        )
    return directory


def inside(path: str, below: Path) -> Path:
    """`path` with every link resolved. Raises `UnusableWeights` where that is not under `below`."""
    with _readable(path):
        directory, root = Path(path).resolve(), below.resolve()
        is_there = directory.is_dir()
    if directory == root or not directory.is_relative_to(root):
        raise UnusableWeights(
            f"{path} is not below {root}, the only directory that weights are taken from; let the "
            "trainer save there, or start the server with another --weights-dir"
        )
    if not is_there:
        raise UnusableWeights(
            f"{path}: no such directory here; trainer and server must see it under one path"
        )
    return directory


def require_complete(kind: WeightKind, directory: Path) -> None:
    """Raises `UnusableWeights` naming every file that is missing."""
    with _readable(directory):
        missing = _missing(kind, directory)
    if missing:
        raise UnusableWeights(f"{directory}: no {', no '.join(missing)}: not a whole {kind.value}")


def _missing(kind: WeightKind, directory: Path) -> list[str]:
    if kind is WeightKind.ADAPTER:
        return [n for n in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (directory / n).is_file()]
    missing = [] if (directory / MODEL_CONFIG).is_file() else [MODEL_CONFIG]
    return missing + ([] if any(directory.glob(MODEL_WEIGHTS_GLOB)) else [MODEL_WEIGHTS_GLOB])


@contextlib.contextmanager
def _readable(path: Path | str) -> Iterator[None]:
    """Raises `UnusableWeights` where what is done inside finds a file gone or barred."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # the latter: links that lead in a circle
        raise UnusableWeights(f"{path}: {error}") from error


def adapter_rank(directory: Path) -> int:
    """`r` of the adapter: the largest of its modules.

    Raises:
        UnusableWeights: its configuration cannot be understood.
    """
    try:
        config: Any = json.loads((directory / ADAPTER_CONFIG).read_text())
        return max(int(r) for r in [config["r"], *(config.get("rank_pattern") or {}).values()])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnusableWeights(
            f"{directory / ADAPTER_CONFIG}: not a LoRA configuration: {error!r}"
        ) from error


def require_rank(directory: Path, max_rank: int) -> None:
    """Raises `UnusableWeights` where the adapter is larger than the engine has room for."""
    rank = adapter_rank(directory)
    if rank > max_rank:
        raise UnusableWeights(
            f"{directory}: rank {rank}, the server accepts at most {max_rank}; train with a lower "
            f"--lora-r, or start the server with --max-lora-rank {rank} or more"
        )
