"""Checks the weight directories that a trainer publishes: location, files and checksum.

Every version has its own directory, which never changes after its publication.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from grpo_core.errors import GrpoError, problems_of
from grpo_core.settings.machine import head_of
from grpo_core.weights.ref import WeightKind, WeightRef

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LORA_A, _LORA_B = ".lora_A.weight", ".lora_B.weight"
SERVED_WEIGHTS = "served_weights"
"""Name of the directory of weights that a server loads."""
FINAL_MODEL, FINAL_ADAPTER = "final_model", "final_adapter"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as --max-lora-rank."""
HEAD = "lm_head"
"""The output layer. With an adapter on it, vLLM 0.32 assigns the adapters of the sampled tokens to
the logits of prompt tokens, so the trainer's check of the served weights ends a CPU engine."""
MODEL_CONFIG, MODEL_WEIGHTS_GLOB = "config.json", "*.safetensors"


class UnusableWeights(GrpoError):
    """A directory of weights is unusable. The message names directory, reason and fix."""


def directory_digest(directory: Path) -> str:
    """SHA-256 (hexadecimal) over the relative names, sizes and bytes of all files below it.

    Raises `OSError` if the directory, or a file in it, cannot be read.
    """
    total = hashlib.sha256()
    directory.stat()  # raises if it is missing; rglob would just find no files
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name = path.relative_to(directory).as_posix()
        line = f"{digest} {path.stat().st_size} {name}\n"
        total.update(line.encode(errors="surrogateescape"))  # file names may be any bytes
    return total.hexdigest()


def check_weights(weights: WeightRef, below: Path) -> Path:
    """Check everything about a published directory that does not need loading it; return its path.

    Args:
        weights: the published weights
        below: the only directory from which weights are accepted

    Raises:
        UnusableWeights: outside `below`, missing, incomplete, or with another checksum.
    """
    directory = inside(str(weights.path), below)
    require_complete(weights.kind, directory)
    with _readable(directory):
        found = directory_digest(directory)
    if found != weights.digest:
        raise UnusableWeights(
            f"{directory}: the directory has checksum {found[:12]}…, but the trainer sent "
            f"{weights.digest[:12]}…; the files changed after they were written, or the "
            "path leads to a different directory on the server's host"
        )
    return directory


def inside(path: str, below: Path) -> Path:
    """Resolve all links of `path`. Raises `UnusableWeights` if the result is not in `below`."""
    with _readable(path):
        directory, root = Path(path).resolve(), below.resolve()
        is_there = _is_directory(directory)
    if directory == root or not directory.is_relative_to(root):
        raise UnusableWeights(
            f"{path} is not in {root}, the only directory from which the server loads weights; "
            "start the server with --weights-dir <the trainer's --save-path>/served_weights"
        )
    if not is_there:
        raise UnusableWeights(
            f"{path}: no such directory; the trainer and the server must see it under one path"
        )
    return directory


def _is_directory(path: Path) -> bool:
    """Unlike `Path.is_dir`, raises `OSError` for links that form a loop. `Path.resolve` raises
    RuntimeError for them before Python 3.13, and nothing since."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def require_complete(kind: WeightKind, directory: Path) -> None:
    """Raises `UnusableWeights` naming every file that is missing."""
    with _readable(directory):
        missing = _missing(kind, directory)
    if missing:
        raise UnusableWeights(
            f"{directory} is not a complete {kind.value}; missing: {', '.join(missing)}"
        )


def _missing(kind: WeightKind, directory: Path) -> list[str]:
    if kind is WeightKind.ADAPTER:
        return [n for n in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (directory / n).is_file()]
    missing = [] if (directory / MODEL_CONFIG).is_file() else [MODEL_CONFIG]
    return missing + ([] if any(directory.glob(MODEL_WEIGHTS_GLOB)) else [MODEL_WEIGHTS_GLOB])


@contextlib.contextmanager
def _readable(path: Path | str) -> Iterator[None]:
    """Raises `UnusableWeights` if the block cannot read a file."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: links that form a loop; ValueError: a path with a NUL
        raise UnusableWeights(f"cannot read {path}: {error}") from error


def without_head(modules: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Returns the names of the modules with an adapter. Raises `ValueError` if one is the head."""
    if any(name.rpartition(".")[2] == HEAD for name in modules or ()):
        raise ValueError(
            f"vLLM serves no adapter on {HEAD} beside prompt logprobs; name other modules"
        )
    return modules


def require_servable_adapter(directory: Path, max_rank: int) -> None:
    """Raises `UnusableWeights` if the adapter's rank is higher than the engine accepts, or if the
    adapter changes the head."""
    config = lora_config(directory)
    rank, targets = config.rank, config.target_modules
    if rank > max_rank:
        raise UnusableWeights(
            f"{directory}: the adapter has rank {rank}, but the server accepts at most "
            f"{max_rank}; train with a lower --lora-r, or start the server with "
            f"--max-lora-rank {rank} or more"
        )
    try:
        without_head(tuple(targets) if isinstance(targets, list) else None)
    except ValueError as error:
        raise UnusableWeights(f"{directory}: {error}") from None


def require_lora_tensors(directory: Path) -> None:
    """Raises `UnusableWeights` if the tensors do not have the ranks of the adapter's configuration,
    or one of a pair is missing."""
    file, ranks = directory / ADAPTER_WEIGHTS, lora_config(directory).ranks
    try:
        shapes = {name: tensor["shape"] for name, tensor in head_of(file)[0].items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnusableWeights(f"{file} cannot be read: {error}") from error
    if not shapes:
        raise UnusableWeights(f"{file} has no tensors; save the adapter again")
    pairs = {name.replace(_LORA_B, _LORA_A) for name in shapes if ".experts" not in name}
    for name in sorted(name for name in pairs if name.endswith(_LORA_A)):
        a, b = shapes.get(name), shapes.get(name.replace(_LORA_A, _LORA_B))
        if not a or not b or a[0] != b[-1] or a[0] not in ranks:
            raise UnusableWeights(
                f"{file}: {name} and its lora_B have the shapes {a} and {b}, but {ADAPTER_CONFIG} "
                f"gives rank {' or '.join(map(str, sorted(ranks)))}; save the adapter again, from "
                "all shards"
            )


def make_private(directory: Path) -> None:
    """Create the directory, or check that no other user can change what is in it. Raises
    `PermissionError`, or another `OSError`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    own, mode = os.getuid(), stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != own or mode & 0o077:
        raise PermissionError(
            f"{directory} must be a directory of user {own} with mode 700, but it belongs to user "
            f"{found.st_uid} and has mode {mode:04o}; delete it, or pass another --staging-dir"
        )


class LoraConfig(BaseModel):
    """The part of PEFT's configuration that is checked. `rank`: the largest of all modules."""

    peft_type: Literal["LORA"] = "LORA"
    base_model_name_or_path: str | None = None
    r: int
    rank_pattern: dict[str, int] | None = None
    target_modules: list[str] | str | None = None

    @property
    def ranks(self) -> set[int]:
        return {self.r, *(self.rank_pattern or {}).values()}

    @property
    def rank(self) -> int:
        return max(self.ranks)


def lora_config(directory: Path) -> LoraConfig:
    """An adapter's configuration. Raises `UnusableWeights` if it is invalid."""
    file = directory / ADAPTER_CONFIG
    try:
        return LoraConfig.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UnusableWeights(f"{file} cannot be read: {error}") from error
    except ValidationError as error:
        raise UnusableWeights(f"{file} is not a LoRA configuration: {problems_of(error)}") from None
