"""Records the place of each checkpoint tensor in shared memory while vLLM loads the checkpoint.

vLLM's loading code copies q, k and v into one fused tensor. `CheckpointMap` records each copy under
the checkpoint's name, so no table of fused layers is needed. `ServedParameters` then finds the
server's parameter that holds the tensor, and its rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_core.weights.shared_memory import ParameterMapping, TensorRegion
from grpo_vllm.weights.memory import WeightMemory, region_at


class CheckpointMap(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, records every copy into shared memory under the current checkpoint name."""

    def __init__(self, memory: WeightMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._name: str | None = None
        self._copies: dict[str, list[TensorRegion]] = {}
        self._scattered: set[str] = set()  # names that no single view can represent

    def watch(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the checkpoint's tensors on, and record which one vLLM is loading. Also record
        whether its values arrive unchanged, because a loader may permute them.
        """
        for name, tensor in weights:
            self._name = name
            yield name, tensor
            self._name = None
            region = _merged(self._copies[name]) if name in self._copies else None
            if region is None:
                continue  # not a parameter, or `unshareable` reports it already
            loaded = self._memory.view(region)
            sent = tensor.to(device=loaded.device, dtype=loaded.dtype)
            if not torch.equal(loaded, sent):  # or of another shape
                self._scattered.add(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and self._name is not None:
            offset = self._memory.offset_of(args[0])
            if offset is not None:
                if not args[0].is_contiguous():
                    self._scattered.add(self._name)
                self._copies.setdefault(self._name, []).append(region_at(offset, args[0]))
        return func(*args, **(kwargs or {}))

    def regions(self) -> dict[str, TensorRegion]:
        """Checkpoint name → its region. `unshareable` has the names without a single region."""
        merged = {name: _merged(copies) for name, copies in self._copies.items()}
        return {
            name: region
            for name, region in merged.items()
            if region is not None and name not in self._scattered
        }

    def unshareable(self) -> dict[str, str]:
        """Checkpoint name → the reason why no contiguous tensor of the server holds it."""
        shareable = self.regions()
        return {
            name: f"loaded in {len(copies)} pieces that do not add up to the checkpoint's tensor"
            for name, copies in self._copies.items()
            if name not in shareable
        }


def _merged(copies: list[TensorRegion]) -> TensorRegion | None:
    """One region for pieces that are adjacent along their first dimension; None if they are not.

    A checkpoint that is fused already (Phi-3) loads one tensor in several adjacent pieces.
    """
    first, *rest = copies
    rows, end = (first.shape[0] if first.shape else 1), first.end
    for piece in rest:
        if piece.offset != end or piece.dtype != first.dtype or piece.shape[1:] != first.shape[1:]:
            return None
        rows, end = rows + piece.shape[0], piece.end
    if not rest:
        return first
    merged = {"nbytes": end - first.offset, "shape": (rows, *first.shape[1:])}
    return first.model_copy(update=merged)


@dataclass(frozen=True)
class _Holder:
    """One parameter and its place in shared memory."""

    name: str
    offset: int
    nbytes: int
    rows: int


class ServedParameters:
    """The model's parameters that are in shared memory after loading, ordered by offset."""

    def __init__(self, model: nn.Module, memory: WeightMemory) -> None:
        self._model = model
        self._memory = memory
        self._holders = sorted(
            (
                _Holder(
                    name, offset, parameter.nbytes, parameter.shape[0] if parameter.dim() else 1
                )
                for name, parameter in model.named_parameters()  # tied parameters appear once
                if (offset := memory.offset_of(parameter)) is not None
            ),
            key=lambda holder: holder.offset,
        )
        self._offsets = [holder.offset for holder in self._holders]

    def mapping(self, region: TensorRegion) -> ParameterMapping | None:
        """The parameter and rows that hold a loaded region; None if no parameter has whole rows.

        The offset is the parameter's current one: if a checkpoint holds equal `lm_head` and
        embedding, vLLM ties them after loading both. A parameter that has left the memory keeps its
        old offset.
        """
        index = bisect_right(self._offsets, region.offset) - 1
        if index < 0:
            return None
        holder = self._holders[index]
        row_bytes = holder.nbytes // holder.rows
        start, misaligned = divmod(region.offset - holder.offset, row_bytes)
        count, torn = divmod(region.nbytes, row_bytes)
        if misaligned or torn or region.end > holder.offset + holder.nbytes:
            return None
        now = self._memory.offset_of(self._model.get_parameter(holder.name))
        moved_by = 0 if now is None else now - holder.offset
        place = region.model_copy(update={"offset": region.offset + moved_by})
        return ParameterMapping(
            **place.model_dump(),
            vllm_name=holder.name,
            slice=None if count == holder.rows else (start, start + count),
        )
