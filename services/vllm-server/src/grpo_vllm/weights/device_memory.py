"""Parameters where vLLM put them, one allocation each: the weight memory of a server on a GPU.

Nothing is moved: an arena beside the parameters would double the peak. Offsets are counted as if
the allocations lay one behind the other, in the order of the model's parameters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from grpo_core.weights.manifest import TensorRegion
from grpo_vllm.weights.memory import aligned


@dataclass(frozen=True)
class Segment:
    """One allocation. `start`: its place in the weight memory, in bytes."""

    start: int
    storage: torch.UntypedStorage

    @property
    def address(self) -> int:
        return self.storage.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()


class DeviceMemory:
    """Args: tensors: what is to be shared; those that lie in one allocation share its segment."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        segments, total_bytes = [], 0
        for storage in storages.values():
            segments.append(Segment(total_bytes, storage))
            total_bytes += aligned(storage.nbytes())
        self.total_bytes = total_bytes
        self._take(segments)

    def forget_all_but(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let go of segments that hold none of `tensors`; the others keep their places."""
        offsets = [offset for t in tensors if (offset := self.offset_of(t)) is not None]
        starts = {self._starts[bisect_right(self._starts, offset) - 1] for offset in offsets}
        self._take([segment for segment in self.segments if segment.start in starts])

    def _take(self, segments: list[Segment]) -> None:
        self.segments = segments
        self._starts = [segment.start for segment in segments]
        self._by_address = sorted(segments, key=lambda segment: segment.address)
        self._addresses = [segment.address for segment in self._by_address]

    def view(self, region: TensorRegion) -> torch.Tensor:
        """The tensor that lies in `region`, sharing memory."""
        segment = self.segments[bisect_right(self._starts, region.offset) - 1]
        raw = torch.empty(0, dtype=torch.uint8, device=segment.storage.device)
        raw.set_(segment.storage, region.offset - segment.start, (region.nbytes,), (1,))
        return raw.view(getattr(torch, region.dtype)).view(region.shape)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Bytes from the start of the memory, or None when the tensor lies elsewhere."""
        index = bisect_right(self._addresses, tensor.data_ptr()) - 1
        if index < 0 or not tensor.numel():
            return None
        segment = self._by_address[index]
        within = tensor.data_ptr() - segment.address
        return segment.start + within if within < segment.nbytes else None
