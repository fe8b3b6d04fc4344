"""Everything that a run needs to go on as if it had never ended, as a record and tensors.

    <save path>/trainer_state/000007_step_30/
        trainer_state.json     `StateRecord`
        tensors.safetensors    fp32: master/<name>, exp_avg/<name>, exp_avg_sq/<name>, step/<name>

The learning rate follows from the step and the settings, which may change between two starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from grpo_trainer.errors import StateMismatch
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.rng_state import RngState
from grpo_trainer.settings import TrainerSettings


@dataclass(frozen=True)
class Position:
    """How far a run is: `step` optimizer steps are taken, the last one on batch `batch_id` (0
    before the first), and the weights are served under `epoch`."""

    step: int
    batch_id: int
    epoch: int


class FileFacts(BaseModel):
    """`sha256` in hexadecimal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int = Field(ge=0)
    sha256: str


class StateRecord(BaseModel):
    """`trainer_state.json`. `parameters`: name → shape; `files`: all others of the directory."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    format: Literal[1] = 1
    step: int = Field(ge=0)
    batch_id: int = Field(ge=0)
    epoch: int = Field(ge=0)
    model_name: str
    optimizer: str
    parameters: dict[str, tuple[int, ...]]
    rng: RngState
    files: dict[str, FileFacts] = {}

    @property
    def position(self) -> Position:
        return Position(self.step, self.batch_id, self.epoch)


@dataclass(frozen=True)
class TrainerState:
    record: StateRecord
    tensors: dict[str, Tensor]


def capture(
    policy: Any, optimizer: MasterOptimizer, settings: TrainerSettings, position: Position
) -> TrainerState:
    """As it is between two steps. The tensors are those that the next step changes: write first."""
    shapes = _shapes(policy)
    record = StateRecord(
        step=position.step,
        batch_id=position.batch_id,
        epoch=position.epoch,
        model_name=settings.model_name,
        optimizer=settings.optimizer,
        parameters=shapes,
        rng=RngState.capture(),
    )
    return TrainerState(record, optimizer.tensors(list(shapes)))


@torch.no_grad()
def restore(state: TrainerState, policy: Any, optimizer: MasterOptimizer) -> None:
    """Into the masters, which the parameters follow with the next write, and the generators."""
    optimizer.load_tensors(list(_shapes(policy)), state.tensors)
    state.record.rng.restore()


def require_fit(record: StateRecord, policy: Any, settings: TrainerSettings, where: str) -> None:
    """Args: where: the state's directory, for the message.

    Raises:
        StateMismatch: another model or optimizer; lists every difference.
    """
    ours, saved = _shapes(policy), record.parameters
    problems = []
    if record.optimizer != settings.optimizer:
        problems.append(f"optimizer: saved {record.optimizer}, now {settings.optimizer}")
    problems += [f"{name}: not in the state" for name in ours if name not in saved]
    problems += [f"{name}: not in the model" for name in saved if name not in ours]
    problems += [
        f"{name}: saved shape {list(saved[name])}, the model's {list(shape)}"
        for name, shape in ours.items()
        if name in saved and saved[name] != shape
    ]
    if problems:
        raise StateMismatch(
            f"{where} does not fit {settings.model_name}:\n  "
            + "\n  ".join(problems)
            + "\npass --resume never to train from the start, or another --save-path"
        )


def _shapes(policy: Any) -> dict[str, tuple[int, ...]]:
    """In the order of the optimizer's masters."""
    return {name: tuple(parameter.shape) for name, parameter in policy.named_parameters()}
