"""Adapters that fail to load or to be removed, and the rows of a batch on a CPU."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

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
    added, the error `remove` instead of removing one. A logprob changes by the effect that
    `effect_of` gives for the directory of an adapter."""

    add: Exception | None = None
    remove: Exception | None = None
    there: set[int] = field(default_factory=set)
    effect_of: Callable[[Path], float] = lambda _: 1.0
    asked: list[Any] = field(default_factory=list)

    async def add_lora(self, request: Any) -> bool:
        self.there.add(request.lora_int_id)
        if self.add is not None:
            raise self.add
        return True

    async def collective_rpc(self, method: str, kwargs: dict[str, int]) -> list[dict[str, Any]]:
        assert (method, kwargs["number"] in self.there) == ("adapter_modules", True)
        return [{"held": ["qkv_proj"], "computed": ["qkv_proj"]}]

    async def generate(
        self, prompt: Any, sampling: Any, request_id: str, lora_request: Any
    ) -> AsyncIterator[Any]:
        assert (sampling.max_tokens, bool(prompt), bool(request_id)) == (1, True, True)
        self.asked.append(lora_request and lora_request.lora_name)
        effect = self.effect_of(Path(lora_request.lora_path)) if lora_request else 0.0
        logprobs = [{7: SimpleNamespace(logprob=effect - 1)}]
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(logprobs=logprobs)])

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


def rounded(adapter: Path) -> float:
    """Of an engine that computes with it: what is below 0.001 is lost."""
    size = float(load_file(adapter / "adapter_model.safetensors")["q_proj.lora_B.weight"].max())
    return size if size > 0.001 else 0.0


@pytest.mark.usefixtures("errors")
@pytest.mark.parametrize(
    ("size", "effect_of", "event"),
    [
        (0.1, rounded, None),
        (0.0, rounded, "adapter.zero"),
        (1e-9, rounded, "adapter.below_rounding"),
        (0.1, lambda _: 0.0, "refused"),
        (1e-9, lambda _: 0.0, "refused"),
    ],
)
async def test_the_base_model_in_place_of_an_adapter_is_refused_unless_rounding_explains_it(
    size: float, effect_of: Callable[[Path], float], event: str | None, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    tensors = {"q_proj.lora_A.weight": torch.ones(2, 4), "q_proj.lora_B.weight": torch.ones(4, 2)}
    tensors["q_proj.lora_B.weight"] *= size
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    engine = LoraEngine(effect_of=effect_of)
    switch = adapters_of(engine)
    version = PolicyVersion(1, 1)
    with capture_logs() as logs:
        if event == "refused":
            with pytest.raises(Exception, match="the base model in its place") as raised:
                await switch.load(tmp_path, version)
            assert raised.typename == "AdapterRefused"
            await wait_for_async(lambda: engine.there == set())
        else:
            await switch.load(tmp_path, version)
            assert engine.there == {1}
    assert (event in [entry["event"] for entry in logs]) is (event not in (None, "refused"))
    asked = len(engine.asked)
    await switch.load(tmp_path, PolicyVersion(1, 2), probes=False)
    assert len(engine.asked) == asked <= 3


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
