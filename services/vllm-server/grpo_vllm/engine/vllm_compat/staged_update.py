"""Loads a directory of safetensors files into the running engine: a backend of vLLM's interface for
weight transfer. vLLM's own backends receive tensors from a trainer, and none works on a CPU.

The supervisor has verified the files and stores them on this host, so an update needs no network.
`EngineControl.update_weights` calls start, update and finish under a pause. Only with the trainer's
--weight-transport collective is there something to connect to: see `Receiver`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from grpo_core.weights.collective import GroupAddress
from grpo_vllm.engine.vllm_compat.collective import Receiver

_CPU_KERNEL = "cpu_linear"
_RELOAD_LOG = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass
class StagedDirectory(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`directory`: has all weights of the model in *.safetensors."""

    directory: str


@dataclass
class Invitation(WeightTransferInitInfo):  # type: ignore[misc]
    """To the trainer's process group. `address`: a `GroupAddress` as JSON; `server`: the server's
    name; `staging`: its directory for copies."""

    address: str
    server: str
    staging: str


class StagedUpdate(WeightTransferEngine):  # type: ignore[misc]
    init_info_cls: ClassVar[type] = Invitation
    update_info_cls: ClassVar[type] = StagedDirectory
    _unfinished = False
    """An update began and did not finish."""
    _receiver: Receiver | None = None

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._names = {name for name, _ in self.model.named_parameters()}
        # At each update it warns of layers without weights in the files: a tied head, and buffers.
        # `receive_weights` raises for weights that are really missing.
        logging.getLogger(_RELOAD_LOG).setLevel(logging.ERROR)

    def init_transfer_engine(self, init_info: Invitation) -> None:
        """Join the group, in place of the previous one. Returns at once."""
        self.shutdown()
        parallel, staging = self.vllm_config.parallel_config, Path(init_info.staging)
        address = GroupAddress.model_validate_json(init_info.address)
        _, first_rank = address.servers[init_info.server]
        worker = (first_rank, parallel.rank, parallel.world_size)
        self._receiver = Receiver(address, *worker, staging, self.device)
        self._receiver.start()

    def start_weight_update(self) -> None:
        if self._unfinished:  # otherwise the next update would find layers on the meta device
            finalize_layerwise_reload(self.model, self.model_config)
        self._unfinished = True
        initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            forget_kernels_of_experts(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, which then synchronises an accelerator: that raises on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StagedDirectory, load_weights: Any = None) -> None:
        """Raises `ValueError` if the files lack weights of the model.

        Args:
            load_weights: vLLM 0.24 passes `self.model.load_weights`. It starts and finishes updates
                itself, and knows no `model_config` here.
        """
        directory = Path(update_info.directory)
        loaded = self.model.load_weights(_tensors(directory))
        missing = self._names - loaded if loaded is not None else set()
        if missing and (load_weights is not None or self.model_config.quantization is None):
            raise ValueError(f"{directory} has no weights for {', '.join(sorted(missing))}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_head()
        round_biases(self.model)
        self._unfinished = False

    def trainer_send_weights(self, *_given: Any) -> None:
        """Of the trainer's side; vLLM 0.24 requires the name."""

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.leave()

    def _repack_head(self) -> None:
        """On a CPU, vLLM multiplies with a packed copy of the output head. A head that is tied to
        the embeddings gets no weights of its own, so its copy would keep the previous ones."""
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead) and hasattr(layer, _CPU_KERNEL):
                layer.quant_method.process_weights_after_loading(layer)


def forget_kernels_of_experts(model: torch.nn.Module) -> None:
    """vLLM packs the weights of experts for a CPU only as it makes their kernel, so that an update
    would leave them unpacked for a kernel that it keeps."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def round_biases(model: torch.nn.Module) -> None:
    """On a CPU with AMX, vLLM adds the bias of a small layer in float32. A new engine rounded it to
    the layer's data type before; an update loads it into float32 at once."""
    for layer in model.modules():
        bias = getattr(layer, "bias", None)
        parameters, _ = get_layerwise_info(layer).restore_metadata
        if hasattr(layer, _CPU_KERNEL) and bias is not None and "weight" in parameters:
            bias.data.copy_(bias.to(parameters["weight"].dtype))


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """In the order of the files, so that the weights of one layer follow each other."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)
