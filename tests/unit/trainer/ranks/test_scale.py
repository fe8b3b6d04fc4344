"""The bytes that FSDP2 exchanges and collects, as `benchmarks.scale` and the plan predict them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.scale import gathered_bytes
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.memory_plan import GIB, MemoryBudget, chosen_plan, collected_bytes, kept_bytes
from grpo_trainer.model.division import Division
from grpo_trainer.model.forward import build_forward_pass
from grpo_trainer.model.loading import HOST
from grpo_trainer.ranks import LEADER, Orders, Ranks
from tests.unit.trainer.forward_rig import qwen, ragged_batch

GATHERED, REDUCED = "_allgather_base_", "_reduce_scatter_base_"


class Exchanged(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the whole tensors of collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("c10d::")
        if name in (GATHERED, REDUCED):
            self.bytes[name] += max(args[0].nbytes, args[1].nbytes)
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=[8, 512])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """This process as one of many that do not exist: exchanges transfer nothing."""
    store = FakeStore()
    dist.init_process_group("fake", rank=LEADER, world_size=request.param, store=store)
    yield Ranks(request.param, LEADER, 60.0)
    dist.destroy_process_group()


def test_a_pass_collects_all_weights_twice_and_adds_up_float32_gradients_once(ranks: Ranks) -> None:
    """With 512 ranks every matrix has fewer rows than there are ranks, and is padded."""
    fields = {"model": "m", "mode": "none", "world_size": ranks.count, "optimizer": "adamw"}
    settings = CommandLine.model_validate(fields | {"fsdp": True}).settings()
    policy = qwen(torch.bfloat16)
    whole = [*qwen(torch.bfloat16).parameters()]
    Division(policy, HOST, Orders(ranks), "the policy")
    forward = build_forward_pass(policy, settings)
    micro = ragged_batch(forward.layout.cut, 1000).micro_batches[0]
    with Exchanged() as exchanged:
        values = forward(policy, micro)
        assert exchanged.bytes == {GATHERED: gathered_bytes(whole, ranks.count, 2)}
        values.logp.sum().backward()  # type: ignore[no-untyped-call]
    assert exchanged.bytes == {
        GATHERED: 2 * gathered_bytes(whole, ranks.count, 2),
        REDUCED: gathered_bytes(whole, ranks.count, 4),
    }


def test_a_rank_collects_two_layers_and_all_that_is_outside_of_layers() -> None:
    """In bfloat16: 48 embeddings and a norm, 32 wide; layers of 7,808 weights, of whose gradients
    one has 2 bytes per weight and two have 4."""
    policy = qwen(torch.bfloat16)
    attention = 2 * 32 * 32 + 2 * 32 * 16 + 32 + 2 * 16
    layer = attention + 3 * 32 * 48 + 2 * 32
    outside = 32 * (48 + 1)
    assert collected_bytes(policy) == 2 * outside + layer * (2 * 2 + 2 + 2 * 4)
    for parameter in policy.parameters():
        parameter.requires_grad_(False)
    assert collected_bytes(policy) == 2 * outside + layer * 2 * 2


@pytest.mark.parametrize(("fsdp", "parts"), [(False, 1), (True, 4)])
def test_the_plan_divides_what_a_divided_rank_keeps(fsdp: bool, parts: int) -> None:
    fields = {"model": "m", "mode": "none", "world_size": 4, "optimizer": "adamw", "fsdp": fsdp}
    settings = CommandLine.model_validate(fields | {"tokens_per_micro_batch": 128}).settings()
    machine = MemoryBudget(True, "a GPU", 80 * GIB, GIB, 2 * GIB, ranks=4)
    plan = chosen_plan(settings, qwen(torch.bfloat16), machine)
    kept = kept_bytes(settings, plan.policy, "adamw").total // parts
    collected = collected_bytes(plan.policy) if fsdp else 0
    assert plan.trainer_bytes(is_recomputed=False) == (
        kept + collected + plan.working_bytes[False] + GIB
    )
