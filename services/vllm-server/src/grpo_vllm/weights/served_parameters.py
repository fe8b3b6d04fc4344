"""Which of the server's own parameters holds a checkpoint tensor, and which rows of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from grpo_core.weights.manifest import ParameterMapping, TensorRegion
from grpo_vllm.weights.memory import ParameterMemory


@dataclass(frozen=True)
class _Holder:
    """One parameter as it lies in the weight memory."""

    name: str
    offset: int
    nbytes: int
    rows: int

    def rows_of(self, region: TensorRegion) -> tuple[int, int] | None:
        """(start, stop) along dimension 0; None where `region` is not whole rows of it."""
        if region.end > self.offset + self.nbytes:
            return None
        row_bytes = self.nbytes // self.rows
        start, misaligned = divmod(region.offset - self.offset, row_bytes)
        count, torn = divmod(region.nbytes, row_bytes)
        return None if misaligned or torn else (start, start + count)


class ServedParameters:
    """The parameters of a model that lie in the weight memory, ordered by place."""

    def __init__(self, model: nn.Module, memory: ParameterMemory) -> None:
        self._holders = sorted(
            (
                _Holder(
                    name, offset, parameter.nbytes, parameter.shape[0] if parameter.dim() else 1
                )
                for name, parameter in model.named_parameters()  # tied parameters come once
                if (offset := memory.offset_of(parameter)) is not None
            ),
            key=lambda holder: holder.offset,
        )
        self._offsets = [holder.offset for holder in self._holders]

    def mapping(self, region: TensorRegion) -> ParameterMapping | None:
        """None where no parameter holds the region as whole rows."""
        index = bisect_right(self._offsets, region.offset) - 1
        if index < 0:
            return None
        holder = self._holders[index]
        rows = holder.rows_of(region)
        if rows is None:
            return None
        return ParameterMapping(
            **region.model_dump(),
            vllm_name=holder.name,
            slice=None if rows == (0, holder.rows) else rows,
        )


def followed(
    mappings: Mapping[str, ParameterMapping], model: nn.Module, memory: ParameterMemory
) -> dict[str, ParameterMapping]:
    """The same, where the server's parameters lie now: vLLM ties `lm_head` to the embedding after
    both were loaded, where a checkpoint holds both and they are equal. What has left the memory
    stays as it was.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: _moved(mapping, memory.offset_of(parameters[mapping.vllm_name]))
        for name, mapping in mappings.items()
    }


def _moved(mapping: ParameterMapping, holder_offset: int | None) -> ParameterMapping:
    if holder_offset is None:
        return mapping
    start, stop = mapping.slice or (0, 1)
    offset = holder_offset + start * mapping.nbytes // (stop - start)
    return mapping.model_copy(update={"offset": offset})
