"""Memory that stands for a server's shared memory, and holds the weights of a model once."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from safetensors.torch import load_file

from grpo_core.weights.shared_memory import ParameterMapping, WeightManifest
from grpo_trainer.weight_sync.shared_memory import MappedWeights


def served(model: Path, dtype: torch.dtype | None = None) -> MappedWeights:
    """The weights of a directory with one file of them, served in `dtype` or that of the file."""
    tensors = {name: t.to(dtype) for name, t in load_file(model / "model.safetensors").items()}
    whole = torch.cat([t.flatten().view(torch.uint8) for t in tensors.values()])
    offsets = itertools.accumulate((t.nbytes for t in tensors.values()), initial=0)
    regions = {
        name: ParameterMapping(
            offset=offset,
            nbytes=tensor.nbytes,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            vllm_name=name,
            slice=None,
        )
        for (name, tensor), offset in zip(tensors.items(), offsets, strict=False)
    }
    manifest = WeightManifest(
        generation="g", model=str(model), total_bytes=whole.nbytes, parameters=regions
    )
    return MappedWeights(manifest, whole.device, lambda r: whole[r.offset : r.end])
