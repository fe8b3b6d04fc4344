"""The content of a checkpoint: a record and the tensors that the next step depends on.

    <save path>/trainer_state/000007_step_30/
        trainer_state.json     `StateRecord`
        tensors.safetensors    master/<name>, and the update rule's state: for AdamW, in fp32,
                               exp_avg/<name>, exp_avg_sq/<name>, step/<name>

A resumed run computes exactly what the uninterrupted run would have computed. The learning rate and
the random numbers of stochastic rounding follow from the step and the settings, so they are not
saved.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Self

import numpy
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from grpo_trainer.config.sync import LoraOptions, ModeName
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.data.batches import Position
from grpo_trainer.errors import StateMismatch
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.policy import CausalLM, base_checksum, device_of, frozen_checksum
from grpo_trainer.optim.gradients import ScaleRecord
from grpo_trainer.optim.master_optimizer import MasterOptimizer


class FileFacts(BaseModel):
    """Size and checksum of a file. `sha256` is in hexadecimal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int = Field(ge=0)
    sha256: str


class StateRecord(BaseModel):
    """The content of `trainer_state.json`.

    `parameters` maps the name of each trained parameter to its shape. `frozen` is a checksum of the
    weights that --train-layer-indices freezes, or of some weights of an adapter's base model.
    `files` describes all other files of the directory. `mode` is --mode. `lora` is None if the
    whole model is trained. `loss_scale` is None if no scale is used. `run_uuid` identifies the run
    at run-api of `batch_id`; None in checkpoints of former versions. `checkpoints` lists the run's
    exported models, the oldest first. `noise` is the rounding noise of the publication check, None
    if it was not measured. `kl_coef` is the weight of the KL penalty after this step, None if it is
    fixed. `maxent` is tau and the average entropy, see `Tau`; None if tau is fixed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    format: Literal[1] = 1
    step: int = Field(ge=0)
    batch_id: int = Field(ge=0)
    epoch: int = Field(ge=0)
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
    wandb_group: str = ""
    files: dict[str, FileFacts] = {}

    @property
    def position(self) -> Position:
        return Position(self.step, self.batch_id, self.epoch)


@dataclass(frozen=True)
class TrainerState:
    record: StateRecord
    tensors: dict[str, Tensor]


def capture(
    policy: CausalLM,
    optimizer: MasterOptimizer,
    settings: TrainerSettings,
    position: Position,
    run_uuid: str,
    checkpoints: Sequence[str] = (),
    noise: float | None = None,
    kl_coef: float | None = None,
    maxent: tuple[float, float] | None = None,
) -> TrainerState:
    """The checkpoint between two steps. Its tensors are not copied: write it before the
    next step."""
    shapes = _shapes(policy)
    record = StateRecord(
        step=position.step,
        batch_id=position.batch_id,
        epoch=position.epoch,
        run_uuid=run_uuid,
        model_name=settings.model,
        mode=settings.sync.mode,
        lora=settings.lora,
        optimizer=settings.optimizer_on(device_of(policy).type),
        master_dtype=settings.master_dtype,
        parameters=shapes,
        frozen=_frozen(policy, settings),
        rng=RngState.capture(),
        loss_scale=None if optimizer.loss_scale is None else optimizer.loss_scale.record,
        checkpoints=tuple(checkpoints),
        noise=noise,
        kl_coef=kl_coef,
        maxent=maxent,
        wandb_group=settings.wandb_group,
    )
    return TrainerState(record, optimizer.tensors(list(shapes)))


@torch.no_grad()
def load_state(state: TrainerState, policy: CausalLM, optimizer: MasterOptimizer) -> None:
    """Load the checkpoint into the master weights and random generators. The next write updates the
    policy's parameters."""
    optimizer.load_tensors(list(_shapes(policy)), state.tensors)
    if optimizer.loss_scale is not None and state.record.loss_scale is not None:
        optimizer.loss_scale.record = state.record.loss_scale
    state.record.rng.restore()


def require_fit(
    record: StateRecord, policy: CausalLM, settings: TrainerSettings, where: str
) -> None:
    """Args: where: the checkpoint's directory, for the message.

    Raises:
        StateMismatch: another model, mode, adapter or optimizer; lists every difference.
    """
    ours, saved = _shapes(policy), record.parameters
    is_other_base = record.frozen is not None and record.frozen != _frozen(policy, settings)
    problems = _other_options(record, settings, device_of(policy).type)
    problems += [
        f"{name}: this parameter is not in the checkpoint" for name in ours if name not in saved
    ]
    problems += [
        f"{name}: this parameter is not in the model" for name in saved if name not in ours
    ]
    problems += [
        f"{name}: shape {list(saved[name])} in the checkpoint, {list(shape)} in the model"
        for name, shape in ours.items()
        if name in saved and saved[name] != shape
    ]
    if is_other_base and not problems:
        problems = [
            "frozen weights: those of this run differ from those of the checkpoint; "
            + (
                "if the server serves another run's weights, restart the server"
                if settings.lora is None
                else "--model is another model than the one that the adapter was trained on"
            )
        ]
    if problems:
        raise StateMismatch(
            f"{where} does not fit {settings.model}:\n  "
            + "\n  ".join(problems)
            + "\nto train from the start, pass `--resume never` or another --save-path"
        )


def _other_options(record: StateRecord, settings: TrainerSettings, device_type: str) -> list[str]:
    now = settings.lora
    pairs: list[tuple[str, object, object]] = [
        ("mode", record.mode, settings.sync.mode),
        ("optimizer", record.optimizer, settings.optimizer_on(device_type)),
        ("master dtype", record.master_dtype, settings.master_dtype),
    ]
    if record.lora is not None and now is not None:
        pairs += [
            (f"lora {name}", getattr(record.lora, name), getattr(now, name)) for name in asdict(now)
        ]
    return [
        f"{what}: the checkpoint has {then}, this run has {this}"
        for what, then, this in pairs
        if then != this
    ]


def _shapes(policy: CausalLM) -> dict[str, tuple[int, ...]]:
    """Shapes of the trained parameters, in the order of the optimizer's master weights."""
    return {name: tuple(p.shape) for name, p in trained_parameters(policy).items()}


def _frozen(policy: CausalLM, settings: TrainerSettings) -> int | None:
    """The checksum of the weights that --train-layer-indices freezes, or of an adapter's base
    model; None if all weights are trained."""
    if settings.lora is not None:
        return base_checksum(policy)
    return None if settings.trained_layers is None else frozen_checksum(policy)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NumpyState(_Record):
    """The state of numpy's global MT19937 generator; `keys` is base64 of 624 uint32."""

    keys: str
    position: int
    has_gauss: int
    cached_gauss: float


class PythonState(_Record):
    """`random.getstate()`"""

    version: int
    words: tuple[int, ...]
    cached_gauss: float | None


class RngState(_Record):
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
        return cls(
            torch=_text(torch.get_rng_state().numpy().tobytes()),
            cuda=tuple(_text(state.numpy().tobytes()) for state in _cuda_states()),
            numpy=NumpyState(
                keys=_text(drawn["state"]["key"].astype("<u4").tobytes()),
                position=drawn["state"]["pos"],
                has_gauss=drawn["has_gauss"],
                cached_gauss=drawn["gauss"],
            ),
            python=PythonState(version=version, words=words, cached_gauss=gauss),
        )

    def restore(self) -> None:
        """Raises ValueError, TypeError or RuntimeError if these are not valid states."""
        held, python = self.numpy, self.python
        keys = numpy.frombuffer(base64.b64decode(held.keys, validate=True), dtype="<u4")
        torch.set_rng_state(_tensor(self.torch))
        # With another number of GPUs the saved states do not apply.
        if len(self.cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([_tensor(state) for state in self.cuda])
        numpy.random.set_state(("MT19937", keys, held.position, held.has_gauss, held.cached_gauss))
        random.setstate((python.version, python.words, python.cached_gauss))


def _cuda_states() -> list[torch.Tensor]:
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if in_use else []


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
