"""The lines of `provenance.jsonl`, below --save-path.

    start         each start of the trainer: code, libraries, machine, options
    publication   each policy version: the digest of its weights, and the batch that they come from
    export        each exported model: the digests of its files

A resumed run repeats the steps that its checkpoint lacks. The lines of the lost steps stay, marked
as lost: the server may have sampled completions with these weights.

On a GPU, only weights that are saved have digests. Their publication is written twice: without
digests right after the step, and with them before the checkpoint. The newest line counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter

from grpo_core.errors import BrokenProvenance, parsing
from grpo_core.wire.policy_version import PolicyVersion

PROVENANCE = "provenance.jsonl"
Facts = tuple[str, str, tuple[int, ...]]
"""Name, data type as in safetensors files, and shape of a tensor."""


class _Line(BaseModel, frozen=True, extra="forbid"):
    """Unknown fields are refused."""


class Code(_Line):
    """`trainer`, `core`: digests of the packages' sources. `own`: those of the files of the user's
    loss and advantages and of the modules beside them that they import, by path."""

    version: str
    trainer: str
    core: str
    own: dict[str, str] = {}


class Machine(_Line):
    """What the bits of a result depend on. `device`: cpu, or the name of the GPU. `cpu`: the
    instructions that torch uses."""

    torch: str
    transformers: str
    python: str
    cpu: str
    threads: int
    device: str
    ranks: int
    fsdp: bool


class Start(_Line):
    """A start of the trainer.

    Args:
        step: steps that the weights include
        checkpoint: from which the run resumed; None without one
        dtype: of the served weights
        tensors: the master weights, in the order of `Publication.digests`
        parts: number of ranks among which each tensor is divided
        config: the resolved options, as in config.yaml
    """

    kind: Literal["start"] = "start"
    step: int
    model: str
    run_uuid: str | None
    checkpoint: str | None
    code: Code
    machine: Machine
    dtype: Literal["float32", "bfloat16", "float16"]
    tensors: tuple[Facts, ...]
    parts: int = Field(1, ge=1)
    config: str


class Parent(_Line):
    """The weights before a step."""

    version: PolicyVersion
    root: str | None


class Publication(_Line):
    """A policy version: its step is the number of steps that the weights include.

    Args:
        root: digest of the master weights; None if it was not computed
        digests: of each tensor; empty without `root`
        parent: None for the first weights of a run, which are those of the model's files
        batch_id: of the batch that led from the parent to these weights; None if no step was taken
        batch: digest of its recorded file; None if it was not recorded
        loss, grad_norm: of the step
        is_served: False if the server continued with older weights
        lost: a resumed run took this step again
    """

    kind: Literal["publication"] = "publication"
    version: PolicyVersion
    root: str | None = None
    digests: tuple[str, ...] = ()
    parent: Parent | None = None
    batch_id: int | None = None
    batch: str | None = None
    seed: int
    loss: float | None = None
    grad_norm: float | None = None
    is_served: bool = True
    lost: bool = False


class Export(_Line):
    """An exported model. `directory`: below --save-path. `files`: digests by name."""

    kind: Literal["export"] = "export"
    step: int
    directory: str
    files: dict[str, str]


Line = Annotated[Start | Publication | Export, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[Line] = TypeAdapter(Line)


def text_of(line: Line) -> str:
    return line.model_dump_json(exclude_defaults=False) + "\n"


def read_lines(path: Path) -> list[Line]:
    """All complete lines. The last one may be incomplete, if its writer was killed.

    Raises:
        BrokenProvenance: the file cannot be read, or a line is invalid; names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise BrokenProvenance(
            f"{path} cannot be read: {error}; name a run's directory or a trainer's --save-path"
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break
        with parsing(f"{path}, line {number}", BrokenProvenance):
            found.append(_ADAPTER.validate_json(line))
    return found


def resumed(lines: Iterable[Line], step: int) -> list[Line]:
    """The lines for a run that resumes after `step`: later publications are lost."""
    return [
        line.model_copy(update={"lost": True})
        if isinstance(line, Publication) and line.version.step > step
        else line
        for line in lines
        if not (isinstance(line, Export) and line.step > step)
    ]
