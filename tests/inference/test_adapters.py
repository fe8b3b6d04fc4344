"""Adapters that fail to load or to be removed, and the rows of a batch on a CPU."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.middleware import InFlight
from tests.support.wait import wait_for_async

REFUSED, TRY_AGAIN = 409, 503


@pytest.fixture(scope="module")
def errors() -> ModuleType:
    """vLLM's import warns about its own dependencies, which we cannot change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from grpo_vllm.routes import errors as module
    return module


@dataclass
class LoraEngine:
    """`there`: the numbers of the loaded adapters. The error `add` is raised after an adapter was
    added, the error `remove` instead of removing one."""

    add: Exception | None = None
    remove: Exception | None = None
    there: set[int] = field(default_factory=set)

    async def add_lora(self, request: Any) -> bool:
        self.there.add(request.lora_int_id)
        if self.add is not None:
            raise self.add
        return True

    async def collective_rpc(self, method: str, kwargs: dict[str, int]) -> list[dict[str, Any]]:
        assert (method, kwargs["number"] in self.there) == ("adapter_modules", True)
        return [{"held": ["qkv_proj"], "computed": ["qkv_proj"]}]

    async def remove_lora(self, number: int) -> bool:
        if self.remove is not None:
            raise self.remove
        self.there.remove(number)
        return True


def adapters_of(engine: LoraEngine) -> Any:
    from grpo_vllm.weights.lora import AdapterSwitch

    return AdapterSwitch(engine, "m", InFlight())


@pytest.mark.parametrize(
    ("error", "name", "says", "status"),
    [
        (RuntimeError("no room"), "AdapterRefused", "/b: no room", REFUSED),
        (FileNotFoundError(2, "gone"), "AdapterRefused", "/b: .*gone", REFUSED),
        (TimeoutError(), "EngineTimeout", "send the request again", TRY_AGAIN),
    ],
)
async def test_an_adapter_that_fails_to_load_leaves_nothing_in_the_engine(
    errors: ModuleType, error: Exception, name: str, says: str, status: int
) -> None:
    engine = LoraEngine()
    switch = adapters_of(engine)
    await switch.load(Path("/a"), PolicyVersion(1, 1))
    engine.add = error
    with pytest.raises(tuple(errors.STATUS), match=says) as raised:
        await switch.load(Path("/b"), PolicyVersion(1, 2))
    assert (raised.typename, errors.STATUS[raised.type]) == (name, status)
    assert switch.directories_in_use() == ["/a"]
    await wait_for_async(lambda: engine.there == {1})


@pytest.mark.usefixtures("errors")
async def test_an_adapter_that_is_not_removed_is_let_go_of_and_later_ones_are_removed() -> None:
    engine = LoraEngine(remove=RuntimeError("not now"))
    switch = adapters_of(engine)
    for step in (1, 2):
        await switch.load(Path(f"/{step}"), PolicyVersion(1, step))
    await wait_for_async(lambda: switch.directories_in_use() == ["/2"])
    engine.remove = None
    await switch.load(Path("/3"), PolicyVersion(1, 3))
    await wait_for_async(lambda: 2 not in engine.there)
    assert asyncio.all_tasks() == {asyncio.current_task()}


ROWS, WIDTH, RANK, SLICES = 7, 8, 2, (4, 6)
SLOTS = torch.tensor([1, -1, 0, 1, -1, 0, 1])
"""By row; -1: no adapter. Every slot is in use."""


@pytest.mark.filterwarnings("ignore")  # of vLLM's imports
@pytest.mark.parametrize("slots", [SLOTS, torch.full((ROWS,), 1), torch.full((ROWS,), -1)])
def test_rows_of_any_mixture_get_their_own_adapter(slots: torch.Tensor) -> None:
    from grpo_vllm.engine.vllm_compat import cpu

    torch.manual_seed(0)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, sum(SLICES))
    a = [torch.randn(2, 1, RANK, WIDTH) for _ in SLICES]
    b = [torch.randn(2, 1, size, RANK) for size in SLICES]
    expected = y.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            parts = [bs[slot, 0] @ (as_[slot, 0] @ x[row]) for as_, bs in zip(a, b, strict=True)]
            expected[row] += 0.5 * torch.cat(parts)
    ends = torch.bincount(slots + 1, minlength=3).cumsum(0)
    rows = slots.argsort(stable=True)
    cpu._add_adapters(y, x, a, b, list(SLICES), 0.5, rows, ends)
    torch.testing.assert_close(y, expected)
