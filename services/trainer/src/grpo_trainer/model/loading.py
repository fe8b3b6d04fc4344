"""What a mode trains, as an object: how it is loaded, written for the server, and recognised."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from grpo_core.weights.files import ADAPTER_WEIGHTS, MODEL_WEIGHTS_GLOB
from grpo_core.weights.ref import WeightKind
from grpo_trainer.checkpoint.export import save_model, write_adapter
from grpo_trainer.checkpoint.save_path import whole_directory
from grpo_trainer.config.sync import LoraOptions
from grpo_trainer.model.adapter import adapter_tensors, with_adapter

log = structlog.get_logger()

HOST = torch.device("cpu")


class TrainedWeights(Protocol):
    """`kind`: of the directories that it writes."""

    kind: WeightKind

    def load(self, dtype: torch.dtype, device: torch.device = HOST) -> Any:
        """The policy as it is before any training, on `device`; what is not trained is in `dtype`.

        Raises:
            PolicyMismatch: the options do not fit the model.
        """

    def write(self, policy: Any, target: Path) -> None:
        """All that a server needs, complete and durable or not at all.

        Raises:
            CheckpointNotSaved: the disk is full, or the like.
        """

    def are_in(self, policy: Any, directory: Path) -> bool:
        """Does `directory`, as `write` makes them, hold exactly the policy's weights? False where
        it cannot be read."""


class WholeModel:
    """Every parameter of the model is trained."""

    kind = WeightKind.CHECKPOINT

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def load(self, dtype: torch.dtype, device: torch.device = HOST) -> Any:
        return _load_model(self._model_name, dtype, device)

    def write(self, policy: Any, target: Path) -> None:
        save_model(policy, self._model_name, target)

    def are_in(self, policy: Any, directory: Path) -> bool:
        ours = {name: p.detach() for name, p in policy.named_parameters()}
        return _are_the_same(ours, sorted(directory.glob(MODEL_WEIGHTS_GLOB)))


class Adapter:
    """The model is frozen and a LoRA adapter is trained."""

    kind = WeightKind.ADAPTER

    def __init__(self, model_name: str, lora: LoraOptions) -> None:
        self._model_name = model_name
        self._lora = lora

    def load(self, dtype: torch.dtype, device: torch.device = HOST) -> Any:
        return with_adapter(_load_model(self._model_name, dtype, device), self._lora)

    def write(self, policy: Any, target: Path) -> None:
        with whole_directory(target) as directory:
            write_adapter(policy, directory)

    def are_in(self, policy: Any, directory: Path) -> bool:
        return _are_the_same(adapter_tensors(policy), [directory / ADAPTER_WEIGHTS])


def _load_model(model_name: str, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype).to(device)
    log.info(
        "loaded the model",
        model=model_name,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
    )
    return policy


def _are_the_same(ours: dict[str, Tensor], files: list[Path]) -> bool:
    try:
        found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError):
        return False
    return found.keys() == ours.keys() and all(
        tensor.dtype == ours[name].dtype and torch.equal(tensor, ours[name].cpu())
        for name, tensor in found.items()
    )
