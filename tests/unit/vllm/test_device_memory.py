"""Parameters that stay where they are: places counted through allocations of their own.

The allocations are of the host here; nothing in the class asks where they are.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grpo_core.weight_manifest import TensorRegion
from grpo_vllm.checkpoint_map import CheckpointMap
from grpo_vllm.cuda_export import in_expandable_segments
from grpo_vllm.device_memory import DeviceMemory
from grpo_vllm.parameter_memory import ALIGNMENT_BYTES
from grpo_vllm.served_parameters import ServedParameters


class Fused(nn.Module):
    """A fused parameter of 6 rows, one whose size is no multiple of the alignment, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(6, 4))
        self.embedding = nn.Parameter(torch.zeros(65, 1, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(0.0))


@pytest.fixture
def model() -> Fused:
    return Fused()


@pytest.fixture
def memory(model: Fused) -> DeviceMemory:
    """Tied and overlapping parameters have one place."""
    return DeviceMemory([*model.parameters(), model.qkv, model.embedding.data[3:]])


def test_each_allocation_has_an_aligned_segment_of_its_own(
    model: Fused, memory: DeviceMemory
) -> None:
    assert [s.start for s in memory.segments] == [0, ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES]
    assert memory.total_bytes == 3 * ALIGNMENT_BYTES
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert [s.address for s in memory.segments] == addresses


def test_rows_are_found_at_their_offset_and_nothing_elsewhere(
    model: Fused, memory: DeviceMemory
) -> None:
    assert memory.offset_of(model.qkv[4:5]) == 4 * 4 * 4
    assert memory.offset_of(model.embedding[64:]) == ALIGNMENT_BYTES + 64 * 2
    assert memory.offset_of(model.qkv.clone()) is None
    assert memory.offset_of(torch.empty(0)) is None
    model.qkv.data = model.qkv.data.clone()  # replaced; the old allocation is kept alive
    assert memory.offset_of(model.qkv) is None


def test_a_view_writes_into_the_parameter(model: Fused, memory: DeviceMemory) -> None:
    start = memory.offset_of(model.embedding)
    assert start is not None
    region = TensorRegion(offset=start + 2, nbytes=4, shape=(2, 1), dtype="bfloat16")
    memory.view(region).fill_(7.0)
    assert model.embedding.flatten()[:4].tolist() == [0.0, 7.0, 7.0, 0.0]


def test_the_checkpoint_is_mapped_as_in_an_arena(model: Fused, memory: DeviceMemory) -> None:
    seen = CheckpointMap(memory)
    weights = {"q": torch.rand(4, 4), "k": torch.rand(2, 4), "scale": torch.tensor(2.0)}
    targets = {"q": model.qkv.data[:4], "k": model.qkv.data[4:], "scale": model.scale.data}
    with seen:
        for name, weight in seen.watch(iter(weights.items())):
            targets[name].copy_(weight)
    served = ServedParameters(model, memory)
    found = {name: served.mapping(region) for name, region in seen.regions().items()}
    assert {n: (m.vllm_name, m.slice) for n, m in found.items() if m is not None} == {
        "q": ("qkv", (0, 4)),
        "k": ("qkv", (4, 6)),
        "scale": ("scale", None),
    }
    for name, mapping in found.items():
        assert mapping is not None
        assert torch.equal(memory.view(mapping), weights[name])


def test_allocations_without_a_parameter_are_let_go(model: Fused, memory: DeviceMemory) -> None:
    model.embedding.data = model.embedding.data.clone()
    memory.forget_all_but(model.parameters())
    assert [s.start for s in memory.segments] == [0, 2 * ALIGNMENT_BYTES]
    region = TensorRegion(offset=2 * ALIGNMENT_BYTES, nbytes=4, shape=(), dtype="float32")
    memory.view(region).fill_(3.0)
    assert model.scale.item() == 3.0


def test_parameters_in_expandable_segments_are_counted() -> None:
    """CUDA cannot export those. With a GPU: tests/gpu."""
    snapshot = [
        {"address": 1000, "total_size": 500, "is_expandable": True},
        {"address": 2000, "total_size": 500, "is_expandable": False},
        {"address": 3000, "total_size": 500},
    ]
    assert in_expandable_segments([1000, 1499, 1500, 2000, 3499], snapshot) == 2
