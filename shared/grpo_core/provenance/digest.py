"""Digests of weights, files and source code: BLAKE3, in hexadecimal."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

from blake3 import blake3

from grpo_core.provenance.records import Facts

TENSOR_DIGITS = 32
"""Of the 64 digits of a tensor's digest: 128 bits suffice to recognise it."""


def tensor_digest(pieces: Iterable[bytes | memoryview]) -> str:
    """The digest of a tensor, or of one rank's rows of it. Args: pieces: of its bytes, in order"""
    return _digest(pieces)[:TENSOR_DIGITS]


def joined(parts: Sequence[str]) -> str:
    """The digest of a tensor from those of its parts, which ranks hold."""
    return parts[0] if len(parts) == 1 else tensor_digest(part.encode() for part in parts)


def root_of(facts: Sequence[Facts], digests: Sequence[str]) -> str:
    """One digest over all tensors."""
    rows = zip(facts, digests, strict=True)
    lines = (f"{name} {dtype} {[*shape]} {digest}\n" for (name, dtype, shape), digest in rows)
    return _digest(line.encode() for line in lines)


def file_digest(path: Path) -> str:
    """Raises `OSError`."""
    state = blake3()
    state.update_mmap(path)
    return state.hexdigest()


def source_digest(package: str) -> str:
    """Of all Python files of an installed package: their paths below it, and their contents."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    files = sorted(root.rglob("*.py"))
    return _digest(
        f"{file.relative_to(root).as_posix()} {file_digest(file)}\n".encode() for file in files
    )


def _digest(pieces: Iterable[bytes | memoryview]) -> str:
    state = blake3()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()
