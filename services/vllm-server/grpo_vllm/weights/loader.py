"""vLLM's load format "grpo_shared": loads a model into memory that a trainer can map.

On CPU the parameters are moved into one arena before the checkpoint loads. On a GPU they stay in
the memory that vLLM allocated.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_core.errors import GrpoError
from grpo_core.weights.shared_memory import WeightManifest
from grpo_vllm.engine.vllm_compat.layers import (
    LOAD_FORMAT,
    DefaultModelLoader,
    LoadConfig,
    current_platform,
    packed_layers,
    register_model_loader,
    replace,
    use_plain_layout,
    why_not_shareable,
)
from grpo_vllm.weights.checkpoint_map import CheckpointMap, ServedParameters
from grpo_vllm.weights.memory import WeightMemory, aligned, exported, region_at, why_not_exportable

_ATTRIBUTE = "grpo_shared_parameters"


@dataclass(frozen=True)
class SharedParameters:
    """`SharedModelLoader` stores this on the model, and `WeightExport` exports it."""

    memory: WeightMemory
    manifest: WeightManifest


class UnshareableWeights(GrpoError):
    """Some model parameters cannot be shared with a trainer. The message lists these parameters."""


@register_model_loader(LOAD_FORMAT)
class SharedModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads like vLLM's default loader, and fails if a parameter is not in shared memory."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))
        self._map: CheckpointMap | None = None

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """vLLM calls this when the modules exist and before any layer processes its weights."""
        self._memory = self.weight_memory(model)
        self._map = CheckpointMap(self._memory)
        with self._map:
            super().load_weights(model, model_config)
        self._served = ServedParameters(model, self._memory)

    def get_all_weights(
        self, model_config: Any, model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        weights = super().get_all_weights(model_config, model)
        return self._map.watch(weights) if self._map is not None else weights

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """Raises `UnshareableWeights`: before loading with all options that prevent sharing, after
        loading with all parameters that a trainer cannot reach."""
        _require_no(why_not_shareable(vllm_config), model_config)
        model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        _require_no(why_not_shareable(vllm_config, model), model_config)
        assert self._map is not None, "vLLM built the model without calling load_weights"
        # All parameters are in their final place now.
        found = {name: self._served.mapping(at) for name, at in self._map.regions().items()}
        manifest = WeightManifest(
            generation=uuid.uuid4().hex,
            model=str(model_config.model),
            total_bytes=self._memory.total_bytes,
            parameters={name: mapping for name, mapping in found.items() if mapping},
        )
        self._memory.keep_only(model.parameters())
        setattr(model, _ATTRIBUTE, SharedParameters(self._memory, manifest))
        self.check_shareable(model)
        return model

    def weight_memory(self, model: nn.Module) -> WeightMemory:
        """Raises `UnshareableWeights` if the platform or torch's allocator cannot share memory."""
        if current_platform.is_cpu():
            arena = move_into_arena(model)
            self.prepare_layers(model)
            return arena
        if not current_platform.is_cuda():
            raise UnshareableWeights(
                "--share-weights works on CPU and on NVIDIA GPUs, not on "
                f"{current_platform.device_name}; start the server without --share-weights"
            )
        memory = WeightMemory(model.parameters())
        obstacle = why_not_exportable(memory)
        if obstacle is not None:
            raise UnshareableWeights(f"--share-weights: {obstacle}")
        return memory

    def prepare_layers(self, model: nn.Module) -> None:
        """On CPU: choose the layers' weight layout before they process their weights."""
        use_plain_layout(model)

    def check_shareable(self, model: nn.Module) -> None:
        assert self._map is not None
        shared: SharedParameters = getattr(model, _ATTRIBUTE)
        mapped = shared.manifest.parameters
        problems = self._map.unshareable()
        for name in self._map.regions().keys() - mapped.keys():
            problems[name] = "not made of whole rows of one of the server's parameters"
        for name, parameter in model.named_parameters():
            offset = shared.memory.offset_of(parameter)
            if offset is None:
                problems[name] = "moved out of shared memory while the server prepared the model"
            elif not any(0 <= at.offset - offset < parameter.nbytes for at in mapped.values()):
                problems[name] = "not loaded from the model's files: a trainer has no name for it"
        problems |= dict.fromkeys(packed_layers(model), "served from a packed copy")
        if problems:
            listed = "\n".join(f"  {name}: {why}" for name, why in sorted(problems.items()))
            raise UnshareableWeights(
                f"cannot share {len(problems)} parameters of {shared.manifest.model} with a "
                f"trainer:\n{listed}\nuse another weight-sync mode for this model"
            )


class WeightExport:
    """Methods that vLLM adds to its worker, so that the server can export the worker's weights:
    `--worker-extension-cls grpo_vllm.weights.loader.WeightExport`"""

    def describe_weights(self) -> dict[str, Any]:
        """The manifest as JSON. On CPU also this process's id and the descriptor of its arena."""
        shared = self._shared_parameters()
        described: dict[str, Any] = {"manifest": shared.manifest.model_dump_json()}
        if shared.memory.fd is not None:
            described |= {"pid": os.getpid(), "fd": shared.memory.fd}
        return described

    def export_weights(self) -> dict[str, str]:
        """Export the GPU memory to one more trainer: `memory` as JSON, or `refused`: the reason."""
        shared = self._shared_parameters().memory
        try:
            memory = exported(shared)
        except RuntimeError as error:  # from torch or CUDA
            return {"refused": f"CUDA cannot export the weights: {error}"}
        return {"memory": memory.model_dump_json()}

    def wait_for_device(self) -> None:
        """Return when all queued work on this worker's GPU is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _shared_parameters(self) -> SharedParameters:
        model: nn.Module = self.get_model()  # type: ignore[attr-defined]
        shared: SharedParameters = getattr(model, _ATTRIBUTE)
        return shared


def move_into_arena(model: nn.Module) -> WeightMemory:
    """Give every parameter uninitialised storage in one new arena."""
    parameters, offset = list(model.parameters()), 0  # tied parameters appear once
    arena = WeightMemory.arena(sum(aligned(parameter.nbytes) for parameter in parameters))
    for parameter in parameters:
        # Setting .data keeps the Parameter's subclass and vLLM's weight_loader attribute.
        parameter.data = arena.view(region_at(offset, parameter))
        offset += aligned(parameter.nbytes)
    return arena


def _require_no(problems: list[str], model_config: Any) -> None:
    if problems:
        raise UnshareableWeights(
            f"--share-weights cannot share {model_config.model} with a trainer:\n  "
            + "\n  ".join(problems)
        )
