"""Checkpoints: a record and the tensors that the next step depends on, in one directory each.

    <save path>/trainer_state/000007_step_30/
        trainer_state.json     `StateRecord`
        tensors.safetensors    master/<name>, and the update rule's state: for AdamW, in fp32,
                               exp_avg/<name>, exp_avg_sq/<name>, step/<name>

With --fsdp each rank writes a file of its rows: `tensors-00001-of-00002.safetensors`, ...

A resumed run computes exactly what the uninterrupted run would have computed. The learning rate and
the random numbers of stochastic rounding follow from the step and the settings, so they are not
saved. The number in front of a name increases over all runs of a save path, and the newest two
checkpoints are kept.
"""

from __future__ import annotations

import base64
import hashlib
import random
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError

from grpo_core.protocol import VERSION
from grpo_core.provenance.records import PROVENANCE
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.weights import LoraOptions, ModeName
from grpo_core.wire.fields import Step
from grpo_trainer.atomic_files import (
    make_directory,
    remove_directory,
    whole_directory,
    write_whole,
)
from grpo_trainer.checkpoint.parts import SavedTensors, StatePart, part_name
from grpo_trainer.data.batches import Position
from grpo_trainer.errors import DamagedState, NewerState
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.division import frozen_checksum
from grpo_trainer.model.policy import CausalLM, device_of
from grpo_trainer.optim.loss_scale import ScaleRecord
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.ranks import ALONE, Ranks


class _StateFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileFacts(_StateFile):
    """Size and checksum of a file. `sha256` is in hexadecimal."""

    size_bytes: int = Field(ge=0)
    sha256: str


class StateRecord(_StateFile):
    """The content of `trainer_state.json`.

    `parameters` maps the name of each trained parameter to its shape. `frozen` is a checksum of the
    weights that --train-layer-indices freezes, or of some weights of an adapter's base model.
    `files` describes all other files of the directory. `mode` is --mode. `lora` is None if the
    whole model is trained. `loss_scale` is None if no scale is used. `run_uuid` identifies the run
    at run-api of `batch_id`; None in checkpoints of former versions. `checkpoints` lists the run's
    exported models, the oldest first. `noise` is the rounding noise of the publication check, None
    if it was not measured. `kl_coef` is the weight of the KL penalty after this step, None if it is
    fixed. `maxent` is tau and the average entropy, see `Tau`; None if tau is fixed.
    `tokens_per_micro_batch` is None in checkpoints of former versions. `format` is 1 if all tensors
    are in one file, 2 if each rank wrote one.
    """

    format: Literal[1, 2] = 1
    step: Step
    batch_id: int = Field(ge=0)
    epoch: Step
    run_uuid: str | None = None
    model_name: str
    mode: ModeName = "shared_vllm"
    lora: LoraOptions | None = None
    optimizer: str
    master_dtype: str = "float32"
    parameters: dict[str, tuple[int, ...]]
    frozen: int | None = None
    rng: RngState
    loss_scale: ScaleRecord | None = None
    checkpoints: tuple[str, ...] = ()
    noise: float | None = None
    kl_coef: float | None = None
    maxent: tuple[float, float] | None = None
    tokens_per_micro_batch: int | None = Field(None, ge=1)
    wandb_group: str = ""
    files: dict[str, FileFacts] = {}

    @property
    def position(self) -> Position:
        return Position(self.step, self.batch_id, self.epoch)


def capture(
    policy: CausalLM,
    optimizer: MasterOptimizer,
    settings: TrainerSettings,
    position: Position,
    run_uuid: str,
    frozen: int | None,
    **others: Any,
) -> StateRecord:
    """The record of a checkpoint between two steps, without its files.

    Args:
        frozen: `checksum_of_untrained` at the start
        others: fields that optional parts of the trainer know
    """
    return StateRecord(
        step=position.step,
        batch_id=position.batch_id,
        epoch=position.epoch,
        run_uuid=run_uuid,
        model_name=settings.model,
        mode=settings.sync.mode,
        lora=settings.lora,
        optimizer=settings.optimizer_on(device_of(policy).type),
        master_dtype=settings.master_dtype,
        parameters=shapes_of(policy),
        frozen=frozen,
        rng=RngState.capture(),
        loss_scale=None if optimizer.loss_scale is None else optimizer.loss_scale.record,
        tokens_per_micro_batch=settings.micro_batch_tokens,
        wandb_group=settings.wandb_group,
        **others,
    )


def shapes_of(policy: CausalLM) -> dict[str, tuple[int, ...]]:
    """Shapes of the trained parameters, in the order of the optimizer's master weights."""
    return {name: tuple(p.shape) for name, p in trained_parameters(policy).items()}


def checksum_of_untrained(policy: CausalLM, settings: TrainerSettings) -> int | None:
    """The checksum of the weights that --train-layer-indices freezes, or of an adapter's base
    model; None if all weights are trained."""
    adapts = settings.lora is not None
    if not adapts and settings.trained_layers is None:
        return None
    return frozen_checksum(policy, is_sample=adapts)


class NumpyState(_StateFile):
    """The state of numpy's global MT19937 generator; `keys` is base64 of 624 uint32."""

    keys: str
    position: int
    has_gauss: int
    cached_gauss: float


class PythonState(_StateFile):
    """`random.getstate()`"""

    version: int
    words: tuple[int, ...]
    cached_gauss: float | None


class RngState(_StateFile):
    """The states of all random generators that this process may use. `torch` is base64, and so is
    each entry of `cuda`, one for each visible GPU; () if no GPU is used."""

    torch: str
    numpy: NumpyState
    python: PythonState
    cuda: tuple[str, ...] = ()

    @classmethod
    def capture(cls) -> Self:
        drawn = numpy.random.get_state(legacy=False)
        version, words, gauss = random.getstate()
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        on_gpus = torch.cuda.get_rng_state_all() if uses_gpu else []
        return cls(
            torch=_text(torch.get_rng_state().numpy().tobytes()),
            cuda=tuple(_text(state.numpy().tobytes()) for state in on_gpus),
            numpy=NumpyState(
                keys=_text(drawn["state"]["key"].astype("<u4").tobytes()),
                position=drawn["state"]["pos"],
                has_gauss=drawn["has_gauss"],
                cached_gauss=drawn["gauss"],
            ),
            python=PythonState(version=version, words=words, cached_gauss=gauss),
        )

    def restore(self) -> None:
        """Set the generators. Raises ValueError, TypeError or RuntimeError for invalid states."""
        mt, python = self.numpy, self.python
        keys = numpy.frombuffer(base64.b64decode(mt.keys, validate=True), dtype="<u4")
        torch.set_rng_state(_tensor(self.torch))
        # With another number of GPUs the saved states do not apply.
        if len(self.cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([_tensor(state) for state in self.cuda])
        numpy.random.set_state(("MT19937", keys, mt.position, mt.has_gauss, mt.cached_gauss))
        random.setstate((python.version, python.words, python.cached_gauss))


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


STATES = "trainer_state"
RECORD = "trainer_state.json"
NEWEST_EPOCH = "newest_epoch"
KEPT = 2
_NAME = re.compile(r"(\d{6,})_step_\d+")


@dataclass(frozen=True)
class SavedState:
    """A checkpoint whose record was read. Its tensors are still on disk."""

    directory: Path
    record: StateRecord

    def load(self, policy: CausalLM, optimizer: MasterOptimizer, ranks: Ranks = ALONE) -> None:
        """Load the checkpoint into the master weights, and into the random generators of rank 0.
        The next write updates the policy's parameters.

        Args: ranks: those that read the files, each its own rows

        Raises:
            DamagedState: a file has changed since it was written.
        """
        record = self.record
        own = sorted(record.files.items())[ranks.index :: ranks.count]
        problems = (_problem(self.directory / name, facts) for name, facts in own)
        told = ranks.gathered("; ".join(filter(None, problems)))
        if any(told):
            raise _damaged(self.directory, "; ".join(filter(None, told)))
        try:
            names = list(trained_parameters(policy))
            optimizer.load_tensors(names, SavedTensors(self.directory, optimizer.place, names))
        except (OSError, SafetensorError, LookupError, ValueError) as error:
            raise _damaged(self.directory, f"cannot read the tensors: {error}") from error
        if optimizer.loss_scale is not None and record.loss_scale is not None:
            optimizer.loss_scale.record = record.loss_scale
        if not ranks.leads:
            return
        try:
            record.rng.restore()
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise _damaged(self.directory, f"{RECORD}: rng: {error}") from error


class StateStore:
    """Args: save_path: of the run; checkpoints are saved in a subdirectory."""

    def __init__(self, save_path: Path) -> None:
        self.directory = save_path / STATES

    def save(self, record: StateRecord, part: StatePart, ranks: Ranks = ALONE) -> Path:
        """Write a checkpoint durably, then remove all but the newest two.

        Args: ranks: those that have a part; the others run `save_part` meanwhile

        Raises:
            CheckpointNotSaved: a file could not be written, e.g. the disk is full; earlier
                checkpoints are intact.
        """
        number = max(self._numbered(), default=0) + 1
        target = self.directory / f"{number:06}_step_{record.step}"
        with whole_directory(target) as directory:
            make_directory(self.directory)
            told = save_part(part, ranks, directory)
            if failed := [text for text in told if not text.startswith("{")]:
                raise OSError("; ".join(failed))
            names = [part_name(index, ranks.count) for index in range(ranks.count)]
            facts = map(FileFacts.model_validate_json, told)
            files = dict(zip(names, facts, strict=True))
            written = {"files": files, "format": 1 if len(files) == 1 else 2}
            _write_record(record.model_copy(update=written), directory)
        for _, path in sorted(self._numbered().items())[:-KEPT]:
            remove_directory(path)
        return target

    def newest(self) -> SavedState | None:
        """The newest checkpoint, if any. Raises `DamagedState` if its record cannot be read."""
        numbered = self._numbered()
        return read_state(numbered[max(numbered)]) if numbered else None

    def all(self) -> list[SavedState]:
        """All checkpoints, the oldest first. Raises as `newest`."""
        return [read_state(path) for _, path in sorted(self._numbered().items())]

    def _numbered(self) -> dict[int, Path]:
        if not self.directory.is_dir():
            return {}
        found = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir())
        return {int(match[1]): path for match, path in found if match}


def save_part(part: StatePart, ranks: Ranks, directory: Path | None = None) -> list[str]:
    """Write this rank's part of a checkpoint. Returns of each rank `FileFacts` as JSON, or why its
    part could not be written.

    Args: directory: known to rank 0
    """
    chosen = Path(ranks.broadcast(str(directory), "a checkpoint"))
    path = chosen / part_name(ranks.index, ranks.count)
    try:
        sha256 = part.write(path)
        told = FileFacts(size_bytes=path.stat().st_size, sha256=sha256).model_dump_json()
    except (OSError, MemoryError) as error:
        told = str(error) or "out of memory"
        if ranks.count > 1:
            told = f"rank {ranks.index} at {socket.gethostname()}: {told}"
        if isinstance(error, FileNotFoundError):
            told += "; with --fsdp, every rank must see the same --save-path"
    return ranks.gathered(told)


def read_state(directory: Path) -> SavedState:
    """Raises `DamagedState`, `NewerState` if the record cannot be read."""
    try:
        record = StateRecord.model_validate_json((directory / RECORD).read_bytes())
    except OSError as error:
        raise _damaged(directory, f"cannot read {RECORD}: {error}") from error
    except ValidationError as error:
        if fields := _of_newer_release(error):
            raise NewerState(
                f"{directory} was written by a newer release than {VERSION}, which this one cannot "
                f"read ({', '.join(fields)} in {RECORD}). Resume with the release that wrote it"
            ) from error
        problems = (
            f"{'.'.join(map(str, found['loc'])) or 'JSON'}: {found['msg']}"
            for found in error.errors()
        )
        raise _damaged(directory, f"{RECORD} is invalid: {'; '.join(problems)}") from error
    return SavedState(directory, record)


def _of_newer_release(error: ValidationError) -> list[str]:
    """The fields that only a newer release writes. Of the same format it writes the others, too: a
    key that is damaged is missing."""
    found = {".".join(map(str, problem["loc"])): problem["type"] for problem in error.errors()}
    if found.get("format") == "literal_error":
        return ["format"]
    if "missing" in found.values():
        return []
    return [name for name, problem in found.items() if problem == "extra_forbidden"]


def _write_record(record: StateRecord, directory: Path) -> None:
    (directory / RECORD).write_text(record.model_dump_json())


def _problem(path: Path, written: FileFacts) -> str | None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size_bytes = path.stat().st_size
    except OSError as error:
        return f"cannot read {path.name}: {error}"
    if size_bytes != written.size_bytes:
        return f"{path.name} has {size_bytes} bytes, but {written.size_bytes} were written"
    if digest != written.sha256:
        return f"the content of {path.name} has changed since the checkpoint was written"
    return None


def _damaged(directory: Path, what: str) -> DamagedState:
    return DamagedState(
        f"{directory}: {what}. run-api has deleted the batches that this checkpoint includes. To "
        "resume without these batches from an older checkpoint, pass --resume DIRECTORY; to train "
        "from the start, pass `--resume never`"
    )


_EPOCH: TypeAdapter[int] = TypeAdapter(Step)


class OpenedEpochs:
    """The epochs that trainers of one save path have started.

    A checkpoint records the epoch at its time. A trainer may start another epoch and die before its
    next checkpoint. If the server then restarts too, only this file records that epoch. A server
    names epochs of its own, too: of an adapter that was loaded by hand, for example.

    Args: save_path: of the run
    """

    def __init__(self, save_path: Path) -> None:
        self._path = save_path / STATES / NEWEST_EPOCH

    def newest(self) -> int:
        """The newest epoch, or 0. Raises `DamagedState`: the file has another content."""
        return max(self._all(), default=0)

    def __contains__(self, epoch: object) -> bool:
        """Whether a trainer started this epoch. Earlier releases recorded the newest one only, so
        the epochs before the first one in the file count as started."""
        opened = self._all()
        return not opened or epoch in opened or (isinstance(epoch, int) and epoch < min(opened))

    def _all(self) -> list[int]:
        try:
            return [_EPOCH.validate_python(int(word)) for word in self._path.read_text().split()]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise DamagedState(
                f"{self._path}: expected whole numbers: {error}; write the highest epoch of the "
                f"policy versions in {self._path.parents[1] / PROVENANCE} into it"
            ) from error

    def open(self, epoch: int) -> None:
        """Record a new epoch durably, before its first publication.

        Raises:
            CheckpointNotSaved: it could not be written.
        """
        opened = self._all()
        if epoch not in opened:
            write_whole(self._path, " ".join(map(str, [*opened, epoch])))
