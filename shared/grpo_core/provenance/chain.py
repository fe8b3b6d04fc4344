"""From a completion back to the base model, as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from grpo_core.errors import BrokenProvenance
from grpo_core.provenance.records import PROVENANCE, Line, Publication, Start, read_lines
from grpo_core.rollouts.record import RolloutRecord
from grpo_core.wire.policy_version import PolicyVersion

SHOWN_DIGITS = 12
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Provenance:
    """The records of a run, in the order in which they were written."""

    save_path: Path
    lines: Sequence[Line]

    @classmethod
    def of(cls, run: Path) -> Provenance:
        """Read the record of a run. `run`: its directory, or --save-path of its trainer.

        Raises:
            BrokenProvenance: there is no record, or it cannot be read.
        """
        file = provenance_file(run)
        return cls(file.parent, read_lines(file))

    @property
    def publications(self) -> Iterator[Publication]:
        """Of each version the newest line."""
        return iter(self.by_version.values())

    @cached_property
    def by_version(self) -> dict[PolicyVersion, Publication]:
        return {line.version: line for line in self.lines if isinstance(line, Publication)}

    @cached_property
    def by_step(self) -> dict[int, Publication]:
        """By number of steps: the newest publication of the weights after them."""
        return {line.version.step: line for line in self.publications if not line.lost}

    @cached_property
    def by_taken_step(self) -> dict[int, Publication]:
        """By training step, counted from 1: the first publication that it led to."""
        taken = [line for line in self.publications if line.batch_id is not None and not line.lost]
        return {line.version.step: line for line in reversed(taken)}

    def start_of(self, published: Publication) -> Start:
        """The start of the trainer that published it.

        Raises:
            BrokenProvenance: there is none.
        """
        found = self._starts.get(id(published))
        if found is None:
            raise BrokenProvenance(f"{self.save_path / PROVENANCE} has no line of kind start")
        return found

    @cached_property
    def _starts(self) -> dict[int, Start]:
        """The start before each line, by the line's identity."""
        found: dict[int, Start] = {}
        newest_start = None
        for line in self.lines:
            newest_start = line if isinstance(line, Start) else newest_start
            if newest_start is not None:
                found[id(line)] = newest_start
        return found

    def ancestors(self, version: PolicyVersion) -> list[Publication]:
        """The publications from a version back to the first one that is known; empty if the version
        was not published by this run."""
        found: dict[PolicyVersion, Publication] = {}
        line = self.by_version.get(version)
        while line is not None and line.version not in found:
            found[line.version] = line
            line = None if line.parent is None else self.by_version.get(line.parent.version)
        return [*found.values()]


def provenance_file(run: Path) -> Path:
    """Find the record of a run; argument and error as of `Provenance.of`."""
    places = (run / PROVENANCE, run / _CHECKPOINTS / PROVENANCE)
    found = next((file for file in places if file.is_file()), None)
    if found is None:
        raise BrokenProvenance(
            f"{run} contains no {PROVENANCE}: its trainer took no step that could be "
            "replayed, or this is neither the directory of a run nor the --save-path of a trainer"
        )
    return found


def chain_of(provenance: Provenance, record: RolloutRecord) -> list[str]:
    """Lines for people: which weights sampled the completion, and where they come from."""
    found = [
        f"completion {record.step}/{record.group}/{record.index}: trained on in step "
        f"{record.step}, score {record.score:g}"
    ]
    if not record.versions:
        return [*found, "its policy version is not known"]
    first, last = (PolicyVersion(*version) for version in record.versions)
    found.append(
        f"all its tokens were sampled by version {first}"
        if first == last
        else f"its first token was sampled by version {first}, its last one by version {last}"
    )
    ancestors = provenance.ancestors(last)
    if first not in [line.version for line in ancestors]:
        found += _lineage(provenance, first, provenance.ancestors(first))
    return found + (_lineage(provenance, last, ancestors) if ancestors or first != last else [])


def _lineage(
    provenance: Provenance, version: PolicyVersion, ancestors: Sequence[Publication]
) -> list[str]:
    if not ancestors:
        return [f"version {version}: weights that the server had before this run published any"]
    return [line for one in ancestors for line in _described(provenance, one)]


def _described(provenance: Provenance, line: Publication) -> Iterator[str]:
    lost = "; lost: a resumed run took this step again" if line.lost else ""
    weights = "without a digest" if line.root is None else line.root[:SHOWN_DIGITS]
    yield f"version {line.version}: weights {weights}{lost}"
    if line.batch_id is not None and line.parent is not None:
        batch = "not recorded" if line.batch is None else line.batch[:SHOWN_DIGITS]
        yield (
            f"  step {line.version.step}: batch {line.batch_id} ({batch}) on version "
            f"{line.parent.version}, seed {line.seed}"
        )
        return
    start = provenance.start_of(line)
    code, machine = start.code, start.machine
    if line.parent is not None:
        yield f"  resumed from {start.checkpoint}: the weights of version {line.parent.version}"
    elif start.checkpoint is not None:
        yield f"  resumed from {start.checkpoint}"
    else:
        yield f"  base model {start.model}, master weights in {start.tensors[0][1]}"
    yield (
        f"  code {code.version} (trainer {code.trainer[:SHOWN_DIGITS]}, core "
        f"{code.core[:SHOWN_DIGITS]}), torch {machine.torch}, transformers {machine.transformers}, "
        f"python {machine.python}, {machine.device} with {machine.cpu}, {machine.threads} threads"
    )
