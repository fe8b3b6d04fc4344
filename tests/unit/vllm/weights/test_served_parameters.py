"""The part of a server's parameter that a mapping names equals the checkpoint's tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from grpo_core.weights.manifest import ParameterMapping, TensorRegion
from grpo_vllm.weights.checkpoint_map import ServedParameters
from grpo_vllm.weights.memory import WeightMemory

ROWS, WIDTH = 6, 4
ROW_BYTES = WIDTH * 4
FUSED_AT, SCALAR_AT, HEAD_AT = 256, 512, 768


def region(offset: int, *shape: int) -> TensorRegion:
    nbytes = 4 * torch.Size(shape).numel()
    return TensorRegion(offset=offset, nbytes=nbytes, shape=shape, dtype="float32")


def rows(start: int, stop: int, offset: int = FUSED_AT) -> TensorRegion:
    return region(offset + start * ROW_BYTES, stop - start, WIDTH)


@pytest.fixture(scope="module")
def arena() -> Iterator[WeightMemory]:
    arena = WeightMemory.arena(1024)
    yield arena
    assert arena.fd is not None
    os.close(arena.fd)


def fused(arena: WeightMemory) -> nn.Module:
    """A model with six fused rows, a scalar and a head of six rows."""
    model = nn.Module()
    model.qkv = nn.Parameter(arena.view(rows(0, ROWS)).copy_(torch.arange(24.0).view(6, WIDTH)))
    model.scale = nn.Parameter(arena.view(region(SCALAR_AT)))
    model.head = nn.Parameter(arena.view(rows(0, ROWS, HEAD_AT)))
    return model


@given(start=st.integers(0, ROWS - 1), count=st.integers(1, ROWS))
def test_rows_of_a_parameter_are_cut_where_the_mapping_says(
    arena: WeightMemory, start: int, count: int
) -> None:
    stop, model = min(start + count, ROWS), fused(arena)
    found = ServedParameters(model, arena).mapping(rows(start, stop))
    assert found is not None
    assert found.vllm_name == "qkv"
    assert found.slice == (None if stop - start == ROWS else (start, stop))
    cut = model.qkv if found.slice is None else model.qkv[slice(*found.slice)]
    assert torch.equal(cut, arena.view(rows(start, stop)))


@pytest.mark.parametrize(
    "elsewhere",
    [
        pytest.param(region(FUSED_AT + 8, 4), id="from within a row"),
        pytest.param(region(FUSED_AT, 2), id="to within a row"),
        pytest.param(region(SCALAR_AT + 44, 1), id="between two parameters"),
    ],
)
def test_regions_that_are_not_whole_rows_of_one_parameter_have_no_mapping(
    arena: WeightMemory, elsewhere: TensorRegion
) -> None:
    assert ServedParameters(fused(arena), arena).mapping(elsewhere) is None


def test_a_parameter_that_is_tied_after_loading_is_followed(arena: WeightMemory) -> None:
    """An update at the parameter's old place would never be served."""
    model = fused(arena)
    served = ServedParameters(model, arena)
    loaded = {"e": rows(0, ROWS), "h": rows(0, ROWS, HEAD_AT), "part": rows(1, 3, HEAD_AT)}

    def mappings() -> dict[str, ParameterMapping]:
        found = {name: served.mapping(where) for name, where in loaded.items()}
        return {name: mapping for name, mapping in found.items() if mapping is not None}

    assert {n: (m.offset, m.nbytes) for n, m in mappings().items()} == {
        name: (where.offset, where.nbytes) for name, where in loaded.items()
    }
    model.head = model.qkv
    tied = mappings()
    assert [tied[name].offset - FUSED_AT for name in ("e", "h", "part")] == [0, 0, ROW_BYTES]
    assert torch.equal(arena.view(tied["part"]), model.head[1:3])
