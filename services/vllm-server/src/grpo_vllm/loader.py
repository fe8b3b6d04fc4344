"""Load format "grpo_shared": the model's parameters live in one arena that a trainer can map."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_core.errors import GrpoError
from grpo_core.weight_manifest import TensorRegion, WeightManifest
from grpo_vllm.arena import Arena, aligned, dtype_name
from grpo_vllm.checkpoint_map import CheckpointMap
from grpo_vllm.engine_internals import (
    DefaultModelLoader,
    LoadConfig,
    current_platform,
    register_model_loader,
    replace_config,
)
from grpo_vllm.plain_layers import packed_layers, use_plain_layout
from grpo_vllm.plugin_names import LOAD_FORMAT
from grpo_vllm.served_parameters import ServedParameters

_ATTRIBUTE = "grpo_shared_parameters"


@dataclass(frozen=True)
class SharedParameters:
    """What the loader leaves on the model for the worker extension to export."""

    arena: Arena
    manifest: WeightManifest


def shared_parameters(model: nn.Module) -> SharedParameters:
    """Raises `AttributeError` where the model was loaded by another loader."""
    shared: SharedParameters = getattr(model, _ATTRIBUTE)
    return shared


class UnshareableWeights(GrpoError):
    """Some parameters cannot be shared with a trainer. Lists all of them."""


@register_model_loader(LOAD_FORMAT)
class SharedModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads as vLLM does, into an arena, and fails closed where a parameter is not in it."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace_config(load_config, load_format="auto"))
        self._map: CheckpointMap | None = None

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Called after the modules exist and before any layer processes its weights."""
        if not current_platform.is_cpu():
            raise UnshareableWeights(
                f"--share-weights works on CPU in this version, not on "
                f"{current_platform.device_name}; start without it"
            )
        arena = move_into_arena(model)
        self.prepare_layers(model)
        self._map = CheckpointMap(arena)
        with self._map:
            super().load_weights(model, model_config)
        served = ServedParameters(model, arena)
        mappings = {name: served.mapping(region) for name, region in self._map.regions().items()}
        manifest = WeightManifest(
            generation=uuid.uuid4().hex,
            model=str(model_config.model),
            total_bytes=arena.total_bytes,
            parameters={name: mapping for name, mapping in mappings.items() if mapping},
        )
        setattr(model, _ATTRIBUTE, SharedParameters(arena, manifest))

    def get_all_weights(
        self, model_config: Any, model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        weights = super().get_all_weights(model_config, model)
        return self._map.watch(weights) if self._map is not None else weights

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """Raises `UnshareableWeights` listing every parameter that a trainer could not reach."""
        model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        self.check_shareable(model)
        return model

    def prepare_layers(self, model: nn.Module) -> None:
        """Decide how layers keep their weights, before they process them."""
        use_plain_layout(model)

    def check_shareable(self, model: nn.Module) -> None:
        assert self._map is not None, "vLLM built the model without calling load_weights"
        shared = shared_parameters(model)
        problems = {
            **self._map.unshareable(),
            **_unplaced(self._map, shared),
            **_outside_arena(model, shared.arena),
            **_never_loaded(model, shared),
            **dict.fromkeys(packed_layers(model), "served from a packed copy"),
        }
        if problems:
            listed = "\n".join(f"  {name}: {why}" for name, why in sorted(problems.items()))
            raise UnshareableWeights(
                f"cannot share {len(problems)} parameters of {shared.manifest.model} with a "
                f"trainer:\n{listed}\nuse another weight-bridge mode for this model"
            )


def move_into_arena(model: nn.Module) -> Arena:
    """Give every parameter storage in one new arena; values are left for the checkpoint."""
    regions: list[tuple[nn.Parameter, TensorRegion]] = []
    offset = 0
    for _, parameter in model.named_parameters():  # tied parameters come once
        nbytes = parameter.numel() * parameter.element_size()
        region = TensorRegion(
            offset=offset,
            nbytes=nbytes,
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
        )
        regions.append((parameter, region))
        offset += aligned(nbytes)
    arena = Arena.create(offset)
    for parameter, region in regions:
        # .data keeps the Parameter subclass and the weight_loader that vLLM hung on it.
        parameter.data = arena.view(region)
    return arena


def _unplaced(seen: CheckpointMap, shared: SharedParameters) -> dict[str, str]:
    return {
        name: "not whole rows of one of the server's parameters"
        for name in seen.regions()
        if name not in shared.manifest.parameters
    }


def _outside_arena(model: nn.Module, arena: Arena) -> dict[str, str]:
    return {
        name: "moved out of the arena while the model was prepared for serving"
        for name, parameter in model.named_parameters()
        if arena.offset_of(parameter) is None
    }


def _never_loaded(model: nn.Module, shared: SharedParameters) -> dict[str, str]:
    starts = [region.offset for region in shared.manifest.parameters.values()]
    return {
        name: "not filled from the checkpoint, so it has no name a trainer knows"
        for name, parameter in model.named_parameters()
        if (offset := shared.arena.offset_of(parameter)) is not None
        and not any(offset <= start < offset + parameter.nbytes for start in starts)
    }
