"""Parameters that stay where they are: places counted through allocations of their own.

The allocations are of the host here; nothing in the class asks where they are.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grpo_core.weight_manifest import TensorRegion
from grpo_vllm.checkpoint_map import CheckpointMap
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
    return DeviceMemory(model.parameters())


def test_each_parameter_has_a_segment_of_its_own(model: Fused, memory: DeviceMemory) -> None:
    assert [s.start for s in memory.segments] == [0, ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES]
    assert memory.total_bytes == 3 * ALIGNMENT_BYTES
    for parameter, segment in zip(model.parameters(), memory.segments, strict=True):
        assert memory.offset_of(parameter) == segment.start
        assert segment.address == parameter.data_ptr()


def test_tied_parameters_share_a_segment(model: Fused) -> None:
    model.head = model.embedding
    tied = DeviceMemory([*model.parameters(), model.embedding.data[3:]])
    assert len(tied.segments) == 3


def test_rows_inside_a_parameter_are_found(model: Fused, memory: DeviceMemory) -> None:
    assert memory.offset_of(model.qkv[4:5]) == 4 * 4 * 4
    assert memory.offset_of(model.embedding[64:]) == ALIGNMENT_BYTES + 64 * 2


def test_what_lies_elsewhere_is_not_found(model: Fused, memory: DeviceMemory) -> None:
    assert memory.offset_of(model.qkv.clone()) is None
    assert memory.offset_of(torch.empty(0)) is None


def test_a_parameter_that_is_replaced_is_noticed(model: Fused, memory: DeviceMemory) -> None:
    """The old allocation is kept alive, so that nothing new can come to lie at its address."""
    model.qkv.data = model.qkv.data.clone()
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


def test_what_no_parameter_lies_in_any_more_is_let_go_of(
    model: Fused, memory: DeviceMemory
) -> None:
    model.embedding.data = model.embedding.data.clone()
    memory.forget_all_but(model.parameters())
    assert [s.start for s in memory.segments] == [0, 2 * ALIGNMENT_BYTES]
    assert memory.offset_of(model.scale) == 2 * ALIGNMENT_BYTES
    region = TensorRegion(offset=512, nbytes=4, shape=(), dtype="float32")
    memory.view(region).fill_(3.0)
    assert model.scale.item() == 3.0
