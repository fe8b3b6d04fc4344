"""Cutting the server's parameter where a mapping says gives the checkpoint's tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from grpo_core.weight_manifest import ParameterMapping, TensorRegion
from grpo_vllm.arena import Arena
from grpo_vllm.served_parameters import ServedParameters, followed

WIDTH = 4
ROW_BYTES = WIDTH * 4


class Fused(nn.Module):
    """Two parameters in an arena: 6 fused rows, then a scalar, 256 bytes apart."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.qkv = nn.Parameter(arena.view(region(0, 6)))
        self.scale = nn.Parameter(arena.view(TensorRegion(**SCALAR)))


SCALAR = {"offset": 256, "nbytes": 4, "shape": (), "dtype": "float32"}


def region(row: int, count: int, shape: tuple[int, ...] | None = None) -> TensorRegion:
    return TensorRegion(
        offset=row * ROW_BYTES,
        nbytes=count * ROW_BYTES,
        shape=shape or (count, WIDTH),
        dtype="float32",
    )


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(512)
    yield arena
    os.close(arena.fd)


def mapping(arena: Arena, of: TensorRegion) -> ParameterMapping | None:
    return ServedParameters(Fused(arena), arena).mapping(of)


@pytest.mark.parametrize(("row", "count"), [(0, 4), (4, 1), (5, 1)])
def test_rows_of_a_fused_parameter(arena: Arena, row: int, count: int) -> None:
    arena.view(region(0, 6)).copy_(torch.arange(24.0).view(6, WIDTH))
    found = mapping(arena, region(row, count))
    assert found is not None
    assert (found.vllm_name, found.slice) == ("qkv", (row, row + count))
    start, stop = found.slice or (0, 0)
    assert torch.equal(Fused(arena).qkv[start:stop], arena.view(region(row, count)))


def test_a_whole_parameter_has_no_slice(arena: Arena) -> None:
    for whole, name in [(region(0, 6), "qkv"), (TensorRegion(**SCALAR), "scale")]:
        found = mapping(arena, whole)
        assert found is not None
        assert (found.vllm_name, found.slice) == (name, None)
        assert found.model_dump(exclude={"vllm_name", "slice"}) == whole.model_dump()


@pytest.mark.parametrize(
    "elsewhere",
    [
        TensorRegion(offset=8, nbytes=16, shape=(4,), dtype="float32"),  # from within a row
        TensorRegion(offset=0, nbytes=8, shape=(2,), dtype="float32"),  # to within a row
        TensorRegion(offset=0, nbytes=260, shape=(65,), dtype="float32"),  # over the end
        TensorRegion(offset=300, nbytes=4, shape=(1,), dtype="float32"),  # behind the last
    ],
)
def test_what_is_not_whole_rows_of_one_parameter_has_no_mapping(
    arena: Arena, elsewhere: TensorRegion
) -> None:
    assert mapping(arena, elsewhere) is None


def test_regions_before_the_first_parameter(arena: Arena) -> None:
    model = nn.Module()
    model.scale = nn.Parameter(arena.view(TensorRegion(**SCALAR)))
    assert ServedParameters(model, arena).mapping(region(0, 1)) is None


class Headed(nn.Module):
    """An embedding and a head of 3 rows each, with places of their own."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.embedding = nn.Parameter(arena.view(region(0, 3)))
        self.head = nn.Parameter(arena.view(region(16, 3)))


def test_a_parameter_that_is_tied_after_loading_is_followed(arena: Arena) -> None:
    """Written at its old place, an update would be served by nobody."""
    model = Headed(arena)
    served = ServedParameters(model, arena)
    loaded = {"e": region(0, 3), "h": region(16, 3), "part": region(17, 2)}
    found = {name: served.mapping(where) for name, where in loaded.items()}
    mappings = {name: mapping for name, mapping in found.items() if mapping is not None}
    assert followed(mappings, model, arena) == mappings
    model.head = model.embedding
    tied = followed(mappings, model, arena)
    assert {name: m.offset for name, m in tied.items()} == {"e": 0, "h": 0, "part": ROW_BYTES}
    assert torch.equal(arena.view(tied["part"]), model.head[1:])
