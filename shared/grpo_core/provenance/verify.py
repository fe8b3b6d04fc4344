"""Compares what is on disk with the digests in `provenance.jsonl`. Needs no torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from grpo_core.provenance.batches import BATCHES
from grpo_core.provenance.chain import Provenance
from grpo_core.provenance.digest import file_digest, joined, root_of, tensor_digest
from grpo_core.provenance.records import Export, Publication
from grpo_core.rollouts.files import file_of_step, steps_in
from grpo_core.settings.machine import head_of

STATES = "trainer_state"
RECORD = "trainer_state.json"
_MASTER = "master/"
_STATE = re.compile(r"\d{6,}_step_(\d+)")


class _Held(BaseModel):
    """A tensor in the head of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[Annotated[int, Field(ge=0)], int]


class _Written(BaseModel):
    sha256: str


class _VerifiedRecord(BaseModel):
    """The part of `trainer_state.json` that is compared."""

    files: dict[str, _Written]


@dataclass
class Findings:
    """What was compared, and what does not match. `undigested`: publications without digests"""

    publications: int = 0
    undigested: int = 0
    checkpoints: int = 0
    models: int = 0
    batches: int = 0
    problems: list[str] = field(default_factory=list)


def verify(provenance: Provenance) -> Findings:
    """Compare the lines with each other, then checkpoints, exported models and batches with them.
    Files that are no longer there are not missed."""
    found = Findings()
    _verify_lines(provenance, found)
    _verify_checkpoints(provenance, found)
    _verify_models(provenance, found)
    _verify_batches(provenance, found)
    return found


def _verify_lines(provenance: Provenance, found: Findings) -> None:
    for line in provenance.publications:
        found.publications += 1
        tensors = provenance.start_of(line).tensors
        if line.root is None:
            found.undigested += 1
        elif len(tensors) != len(line.digests) or root_of(tensors, line.digests) != line.root:
            found.problems.append(f"version {line.version}: its root does not fit its digests")
        if line.parent is None:
            continue
        before = provenance.by_version.get(line.parent.version)
        if before is not None and before.root != line.parent.root:
            found.problems.append(
                f"version {line.version}: its parent {before.version} has other weights"
            )
        if line.batch_id is None and line.parent.root != line.root:
            found.problems.append(
                f"version {line.version}: other weights than {line.parent.version} without a step"
            )


def _verify_checkpoints(provenance: Provenance, found: Findings) -> None:
    for directory in sorted((provenance.save_path / STATES).glob("*_step_*")):
        if not (match := _STATE.fullmatch(directory.name)):
            continue
        found.checkpoints += 1
        step = int(match[1])
        line = provenance.by_step.get(step)
        if line is None or line.root is None:
            missing = "publication" if line is None else "digest"
            found.problems.append(f"{directory}: no {missing} of step {step} is recorded")
            continue
        try:
            found.problems += _problems_of_state(provenance, directory, line)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            found.problems.append(f"{directory}: cannot be read: {error}")


def _problems_of_state(provenance: Provenance, directory: Path, line: Publication) -> Iterator[str]:
    start = provenance.start_of(line)
    record = _VerifiedRecord.model_validate_json((directory / RECORD).read_bytes())
    heads = {directory / name: head_of(directory / name) for name in sorted(record.files)}
    for (name, dtype, shape), digest in zip(start.tensors, line.digests, strict=True):
        held = {
            path: (_Held.model_validate(head[_MASTER + name]), 8 + head_bytes)
            for path, (head, head_bytes) in heads.items()
            if _MASTER + name in head
        }
        rows = [one.shape for one, _ in held.values()]
        joined = (sum(of_rank[0] for of_rank in rows), *rows[0][1:]) if rows[1:] else rows[0]
        if {one.dtype for one, _ in held.values()} != {dtype} or joined != shape:
            yield f"{_listed(held)}: {name} has another type or shape"
            continue
        data = b"".join(_bytes_of(path, name, *place) for path, place in held.items())
        if _of_rows(data, shape, start.parts) != digest:
            yield f"{_listed(held)}: {name} is not that of version {line.version}"
    for name, written in record.files.items():
        with (directory / name).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != written.sha256:
            yield f"{directory / name}: its content has changed since it was written"


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(map(str, paths))


def _bytes_of(path: Path, name: str, held: _Held, start: int) -> bytes:
    begin, end = held.data_offsets
    if start + end > path.stat().st_size:
        raise ValueError(f"{path.name} ends before {name} does")
    with path.open("rb") as file:
        file.seek(start + begin)
        return file.read(end - begin)


def _of_rows(data: bytes, shape: Sequence[int], parts: int) -> str:
    """The digest of a tensor whose rows are divided among ranks, as torch.chunk divides them."""
    rows = shape[0] if shape else 1
    row = len(data) // max(1, rows)
    size = row * -(-rows // parts)
    pieces = (data[rank * size : (rank + 1) * size] for rank in range(parts))
    return joined([tensor_digest([piece]) for piece in pieces])


def _verify_models(provenance: Provenance, found: Findings) -> None:
    newest = {line.directory: line for line in provenance.lines if isinstance(line, Export)}
    for line in newest.values():
        directory = provenance.save_path / line.directory
        if not directory.is_dir():
            continue
        found.models += 1
        for name, digest in line.files.items():
            path = directory / name
            if not path.is_file():
                found.problems.append(f"{path}: missing")
            elif file_digest(path) != digest:
                found.problems.append(f"{path}: its content has changed since it was written")


def _verify_batches(provenance: Provenance, found: Findings) -> None:
    directory = provenance.save_path / BATCHES
    for step in steps_in(directory) if directory.is_dir() else ():
        line, path = provenance.by_taken_step.get(step), file_of_step(directory, step)
        if line is None or line.batch is None:
            continue  # of the step that the trainer takes now
        found.batches += 1
        try:
            if file_digest(path) != line.batch:
                found.problems.append(f"{path}: not the batch of version {line.version}")
        except OSError as error:
            found.problems.append(f"{path}: cannot be read: {error}")
