"""The plan counts every byte that a real step keeps, measured as the live memory of all tensors."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_core import cpu
from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import ForwardOptions
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.wire.fields import MASKED
from grpo_tiny_model.model import build_model
from grpo_tiny_model.spec import TinySpec
from grpo_trainer import memory_plan as memory_plan_module
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.memory_plan import KeptBytes, memory_plan
from grpo_trainer.model import fused_head
from grpo_trainer.model.forward import FastForward, build_forward_pass
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.policy import train_only
from grpo_trainer.model.reference import build_reference
from grpo_trainer.optim.master_optimizer import build_optimizer
from grpo_trainer.weight_sync.shared_memory import build_policy
from tests.unit.trainer.groups import collated, group
from tests.unit.trainer.served_memory import served

BF16 = torch.bfloat16
OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor")
SOME = "1-2"
Changes = dict[str, Any]
WHOLE_MODEL: list[Changes] = [
    {"optimizer": optimizer, "master_dtype": master_dtype, "train_layer_indices": layers}
    for optimizer, master_dtype, layers in itertools.product(
        OPTIMIZERS, ("float32", "bfloat16"), (None, SOME)
    )
]
ADAPTER: list[Changes] = [{"optimizer": optimizer} for optimizer in OPTIMIZERS]
BY_MODE = {
    "shared_vllm": WHOLE_MODEL,
    "none": WHOLE_MODEL,
    "lora_only": ADAPTER,
    "lora_restart": ADAPTER,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `make demo`, untrained, in bfloat16."""
    directory = tmp_path_factory.mktemp("tiny")
    build_model(512, TinySpec()).to(BF16).save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True, scope="module")
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["fast in bfloat16", "slow in bfloat16"])
def _cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without instructions for it serves and trains float32 by default."""
    is_slow = request.param == "slow in bfloat16"
    monkeypatch.setattr(cpu, "CPU", dataclasses.replace(cpu.CPU, is_slow_in_bfloat16=is_slow))


@pytest.mark.usefixtures("_cpu")
@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=() if mode == "lora_only" else pytest.mark.full) for mode in BY_MODE],
)
def test_a_step_of_the_tiny_model_keeps_what_the_plan_says(tiny: Path, mode: str) -> None:
    """Modes with equal memory take different numbers of micro-batches."""
    require_as_planned(tiny, mode, micro_batches=1 if mode in ("none", "lora_only") else 2)


@pytest.mark.usefixtures("_cpu")
@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only"])
def test_only_a_whole_model_needs_memory_for_a_reference_model(tiny: Path, mode: str) -> None:
    require_as_planned(tiny, mode, micro_batches=1, kl_coef=0.1, combinations=1)


@pytest.mark.parametrize("vocabulary", [4096, pytest.param(49152, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_take_what_the_plan_says(
    dtype: str, vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of twice as many tokens, less those of once as many: the rest is the output layer's,
    which computes some logits at a time, fewer for the smaller vocabulary."""
    if vocabulary == 4096:
        for module in (fused_head, memory_plan_module):
            monkeypatch.setattr(module, "CHUNK_LOGITS_ON_CPU", 2**20)
    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA, vocab_size=vocabulary)
    policy: Any = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    policy.save_pretrained(tmp_path)
    sizes = {"planned": [0, 0], "measured": [0, 0]}
    for times in (0, 1):
        tokens = 9 * LENGTH << times
        options = {"model": str(tmp_path), "mode": "none", "device": "cpu", "dtype": dtype}
        line = CommandLine.model_validate({**options, "tokens_per_micro_batch": tokens})
        sizes["planned"][times] = memory_plan(line.settings()).working_bytes[0]
        sizes["measured"][times] = stored_bytes(policy, tokens)
    planned, measured = (twice - once for once, twice in sizes.values())
    assert planned == pytest.approx(measured, rel=0.06)


LLAMA: Changes = {
    "hidden_size": 72,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""Of SmolLM2-135M's proportions, which has 49,152 tokens."""
LENGTH = 48
"""Of prompts, and of completions in groups of 8."""


def stored_bytes(policy: Any, tokens: int) -> int:
    """What a forward pass keeps for the backward pass, beside the weights."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    stored: dict[int, int] = {}
    sent = []
    for number in range(tokens // (9 * LENGTH)):
        prompt = [number, *range(1, LENGTH)]
        rows = [[*prompt, first, *range(1, LENGTH + 1)] for first in range(10, 18)]
        sent.append(
            group(
                tokens=rows,
                masks=[[MASKED] * LENGTH + row[LENGTH:] for row in rows],
                scores=[float(i % 2) for i in range(len(rows))],
                inference_logprobs=[[-0.1] * len(row) for row in rows],
            )
        )
    forward = build_forward_pass(policy, ForwardOptions())
    (micro,) = collated(*sent, micro_batch_size=8 * len(sent)).micro_batches

    def store(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
        values = forward(policy, micro)
    assert values.logp.requires_grad  # the pass is still stored
    return sum(stored.values())


def require_as_planned(
    model: Path,
    mode: str,
    micro_batches: int,
    kl_coef: float = 0.0,
    combinations: int | None = None,
) -> None:
    """Compare the mode's first combinations, or all of them."""
    options: Changes = {
        "model": str(model),
        "mode": mode,
        "gradient_accumulation_steps": micro_batches,
        "kl_coef": kl_coef,
    }
    for changes in BY_MODE[mode][:combinations]:
        line = CommandLine(**options, **changes)
        if cpu.CPU.is_slow_in_bfloat16 and line.master_dtype == "bfloat16":
            continue  # refused: the weights are in float32
        plan = memory_plan(line.settings())
        planned = plan.kept
        hide_older_objects()
        measured, parts = measured_bytes(line, plan.dtype)
        assert planned.total == pytest.approx(measured, rel=0.05), changes
        assert vars(planned) == pytest.approx(vars(parts), rel=0.001), changes


def measured_bytes(line: CommandLine, dtype: torch.dtype) -> tuple[int, KeptBytes]:
    """Take a step and gather the gradients of the next one. Returns the size of all live tensors
    except the server's, and of those that the plan names."""
    settings = line.settings()
    is_shared = settings.sync.mode == "shared_vllm"
    policy: Any = (
        build_policy(line.model, served(Path(line.model), dtype))
        if is_shared
        else TrainedWeights(line.model, settings.lora).load(dtype)
    ).eval()
    if settings.trained_layers is not None:
        train_only(policy, settings.trained_layers)
    reference = build_reference(policy, FastForward(), settings)
    optimizer = build_optimizer(policy, settings)
    batch = collated(*(group() for _ in range(line.gradient_accumulation_steps)))
    accumulate_gradients(policy, batch, GRPO, 0)
    optimizer.step(0)
    optimizer.write_into_parameters()
    accumulate_gradients(policy, batch, GRPO, 1, optimizer=optimizer)
    live = live_bytes() - (weights_bytes(policy) if is_shared else 0)
    state = optimizer.tensors([str(index) for index in range(len(optimizer.masters))])
    masters = sum(t.nbytes for name, t in state.items() if name.startswith("master/"))
    gradients = [g for g in optimizer.gradients.tensors if g is not None]
    copies = (not is_shared) + (reference is not None and not reference.is_policy)
    return live, KeptBytes(
        weights=copies * weights_bytes(policy),
        masters=masters,
        gradients=sum(g.nbytes for g in gradients),
        moments=sum(t.nbytes for n, t in state.items() if not n.startswith(("master/", "step/"))),
    )


def weights_bytes(policy: Any) -> int:
    return sum(p.nbytes for p in policy.parameters())


def hide_older_objects() -> None:
    """Hide all objects of this process from `gc`, which then takes milliseconds."""
    gc.collect()
    gc.freeze()


def live_bytes() -> int:
    """The memory of all newer tensors; tensors that share memory count once."""
    gc.collect()
    # `isinstance` would import modules that some objects of torch only stand for.
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
