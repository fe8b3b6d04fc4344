"""Faults in the trainer's code, each put there by replacing a function or a method. They are there
from the start."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from torch import Tensor

from grpo_trainer import advantages, learner, losses
from grpo_trainer.losses import LossInputs, LossParts
from grpo_trainer.model import loading
from grpo_trainer.model.adapter import adapter_dropouts
from grpo_trainer.model.reference import Reference
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.optim.master_update import MasterUpdate
from grpo_trainer.weight_sync import build as build_module
from grpo_trainer.weight_sync.shared import SharedVllm

Patch = pytest.MonkeyPatch
Sabotage = Callable[[Patch], None]


def nothing(_: Patch) -> None:
    """Leave the trainer as it is."""


class PrivateCopy(SharedVllm):
    """Trains a copy, so that updates are announced but never reach the server."""

    def load_policy(self, restoring: bool = False) -> Any:
        return copy.deepcopy(super().load_policy(restoring))


def train_a_copy(patch: Patch) -> None:
    build = build_module.build_weight_sync

    def build_copy(*arguments: Any) -> Any:
        sync = build(*arguments)
        sync.__class__ = PrivateCopy
        return sync

    patch.setattr(build_module, "build_weight_sync", build_copy)


def write_only_once(patch: Patch) -> None:
    """Write only the first update. Server and trainer read the same memory, so they agree."""
    write, written = MasterOptimizer.write_into_parameters, list[None]()

    def forgetful(optimizer: MasterOptimizer, *may_write: Any) -> None:
        if not written:
            write(optimizer, *may_write)
        written.append(None)

    patch.setattr(MasterOptimizer, "write_into_parameters", forgetful)


def embedding_left_out(patch: Patch) -> None:
    """The first parameter keeps its values, as a head that was tied once and is a copy now."""
    write = MasterOptimizer.write_into_parameters

    def all_but_one(optimizer: MasterOptimizer, *may_write: Any) -> None:
        first = optimizer._parameters[0]
        before = first.detach().clone()
        write(optimizer, *may_write)
        first.detach().copy_(before)

    patch.setattr(MasterOptimizer, "write_into_parameters", all_but_one)


def rounded_to_bfloat16(patch: Patch) -> None:
    right = MasterUpdate.step

    def rounding(self: MasterUpdate, part: Any, *others: Any) -> None:
        right(self, part, *others)
        part.master.copy_(part.master.bfloat16())

    patch.setattr(MasterUpdate, "step", rounding)


def dropout_in_the_check(patch: Patch) -> None:
    """The pass that is compared with the server is the one with dropout."""
    find = adapter_dropouts

    def switch_on(policy: Any) -> list[Any]:
        for module in find(policy):
            module.train()
        return []

    patch.setattr(learner, "adapter_dropouts", switch_on)


def reference_is_policy(patch: Patch) -> None:
    patch.setattr(
        learner, "build_reference", lambda policy, forward, *_: Reference(policy, forward, False)
    )


def micro_batch_dropped(patch: Patch) -> None:
    """Every fourth micro-batch gives no gradient."""
    calls: list[None] = []

    def factor() -> bool:
        calls.append(None)
        return bool(len(calls) % 4)

    _multiply_losses(patch, factor)


def divided_again(patch: Patch) -> None:
    """By the number of micro-batches, although the weights of the tokens are those of the batch."""
    accumulate, number = learner.accumulate_gradients, [1]

    def counting(policy: Any, batch: Any, *others: Any) -> Any:
        number[0] = len(batch.micro_batches)
        return accumulate(policy, batch, *others)

    patch.setattr(learner, "accumulate_gradients", counting)
    _multiply_losses(patch, lambda: 1 / number[0])


def _multiply_losses(patch: Patch, factor: Callable[[], float]) -> None:
    right = losses.step_loss

    def multiplied(*arguments: Any) -> LossParts:
        by = factor()
        return LossParts(*(part * by for part in right(*arguments)))

    patch.setattr(learner, "step_loss", multiplied)


def mean_of_micro_batch(patch: Patch) -> None:
    """Each micro-batch counts as much as the others, however many tokens it has."""
    right = LossInputs.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[LossInputs], values: Any, micro: Any, objective: Any) -> LossInputs:
        inputs: LossInputs = right(cls, values, micro, objective)
        object.__setattr__(inputs, "weight", inputs.weight / inputs.weight.sum())
        return inputs

    patch.setattr(LossInputs, "of", classmethod(of))


def kl_turned(patch: Patch) -> None:
    right = losses.kl_penalty
    patch.setattr(losses, "kl_penalty", lambda *arguments: -right(*arguments))


def kl_left_out(patch: Patch) -> None:
    right = losses.kl_penalty
    patch.setattr(losses, "kl_penalty", lambda *arguments: 0 * right(*arguments))


def bounds_exchanged(patch: Patch) -> None:
    right = losses.bounds

    def exchanged(objective: Any) -> tuple[float, float]:
        low, high = right(objective)
        return 2 - high, 2 - low

    patch.setattr(losses, "bounds", exchanged)


def ratio_to_itself(patch: Patch) -> None:
    """The policy's own logprobs in the place of the behaviour logprobs."""
    patch.setattr(losses, "_log_ratio", lambda logp, _: logp - logp.detach())


def advantages_of_batch(patch: Patch) -> None:
    patch.setitem(advantages.NAMED_ADVANTAGES, "group_std", advantages.batch_std)


def adapter_scaled(patch: Patch) -> None:
    def doubled(directory: Path) -> None:
        file = directory / "adapter_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))

    _change_adapters(patch, doubled)


def adapter_renamed(patch: Patch) -> None:
    """Its keys are those of the language model within a vision model."""

    def renamed(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        yield name.replace("model.layers.", "model.language_model.layers."), tensor

    _change_adapter_tensors(patch, renamed)


def adapter_without_layer(patch: Patch) -> None:
    """Without the tensors of the second layer."""

    def kept(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if "layers.1." not in name:
            yield name, tensor

    _change_adapter_tensors(patch, kept)


def _change_adapter_tensors(
    patch: Patch, change: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
) -> None:
    def rewrite(directory: Path) -> None:
        file = directory / "adapter_model.safetensors"
        tensors = safetensors.torch.load(file.read_bytes())
        found = dict(pair for item in tensors.items() for pair in change(*item))
        file.write_bytes(safetensors.torch.save(found, {"format": "pt"}))

    _change_adapters(patch, rewrite)


def _change_adapters(patch: Patch, change: Callable[[Path], None]) -> None:
    right = loading.write_adapter

    def write(policy: Any, directory: Path) -> None:
        right(policy, directory)
        change(directory)

    patch.setattr(loading, "write_adapter", write)
