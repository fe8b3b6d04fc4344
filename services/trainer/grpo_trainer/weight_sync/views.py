"""Builds a transformers model whose parameters are views into the server's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from grpo_core.weights.shared_memory import WeightManifest
from grpo_trainer.errors import MovedParameters, PolicyMismatch, ServedWeightsDiffer
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.shared_memory import MappedWeights


def build_policy(model_name: str, weights: MappedWeights) -> CausalLM:
    """The model of `model_name`'s configuration, built from views; nothing is copied.

    Raises:
        PolicyMismatch: names, shapes or dtypes differ from the server's; lists all of them.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(model_name)
    # Parameters are created on the meta device, because they become views below. Buffers are
    # created for real: they hold computed values, such as rotary frequencies, that no model file
    # contains.
    with init_empty_weights(include_buffers=False):
        policy: Any = AutoModelForCausalLM.from_config(config, dtype=weights.dtype)
    with contextlib.suppress(OSError):  # it may name further end tokens; some models have none
        policy.generation_config = GenerationConfig.from_pretrained(model_name)
    policy.tie_weights()  # creating parameters on the meta device untied them
    parameters = dict(policy.named_parameters())
    _check_fit(model_name, parameters, weights.manifest)
    for name, parameter in parameters.items():
        view = weights.view(weights.manifest.parameters[name])
        owner, _, leaf = name.rpartition(".")
        policy.get_submodule(owner).register_parameter(leaf, nn.Parameter(view))
        del parameter
    policy.tie_weights()
    _move_buffers(policy, weights.device)
    check_views(policy, weights)
    built: CausalLM = policy
    return built


def move_views(policy: CausalLM, weights: MappedWeights) -> None:
    """Point every parameter of the policy to new memory, and keep the values found there.

    The parameters stay the same objects, so their gradient hooks stay too.

    Raises:
        PolicyMismatch: the memory does not hold this model.
    """
    parameters = dict(policy.named_parameters())
    _check_fit(policy.__class__.__name__, parameters, weights.manifest)
    for name, parameter in parameters.items():
        parameter.data = weights.view(weights.manifest.parameters[name])
    check_views(policy, weights)


def release_views(policy: CausalLM) -> None:
    """Replace the parameters' memory with placeholders until `move_views`, so that the memory of an
    ended server can be freed."""
    for parameter in policy.parameters():
        parameter.data = parameter.new_empty(1).expand(parameter.shape)


def check_views(policy: CausalLM, weights: MappedWeights) -> None:
    """Check that every parameter is still in the memory that the server reads.

    Raises:
        MovedParameters: lists every parameter that is not.
    """
    moved = [
        name
        for name, parameter in policy.named_parameters()
        if parameter.data_ptr() != weights.address(weights.manifest.parameters[name])
    ]
    if moved:
        raise MovedParameters(
            f"{len(moved)} parameters are no longer in the server's memory: {', '.join(moved)}; "
            "remove the code that called .to() or share_memory_(), or replaced .data, after the "
            "policy was built"
        )


def _move_buffers(policy: CausalLM, device: torch.device) -> None:
    """Copy the buffers to the device. `policy.to()` would also move the views."""
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _check_fit(
    model_name: str, parameters: Mapping[str, nn.Parameter], manifest: WeightManifest
) -> None:
    regions = manifest.parameters
    used = {regions[name].offset for name in parameters if name in regions}
    problems = [
        f"{name}: the server has no such parameter" for name in parameters if name not in regions
    ]
    problems += [
        f"{name}: served shape {list(regions[name].shape)}, policy shape {list(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in regions and tuple(parameter.shape) != regions[name].shape
    ]
    # Model files may name one tensor twice (tied embeddings); both names then have one offset.
    problems += [
        f"{name}: the server has this parameter, but the policy does not"
        for name, region in regions.items()
        if name not in parameters and region.offset not in used
    ]
    if problems:
        raise PolicyMismatch(
            f"the policy of {model_name} does not fit the served {manifest.model}:\n  "
            + "\n  ".join(problems)
            + "\nload the same model on both sides"
        )


@torch.no_grad()
def load_masters(policy: CausalLM, weights: TrainedWeights, optimizer: MasterOptimizer) -> None:
    """Replace the master weights by those of a model's files.

    Raises:
        ServedWeightsDiffer: layers that are not trained differ from the files.
    """
    files = dict(weights.load(next(policy.parameters()).dtype).named_parameters())
    views = dict(policy.named_parameters())
    frozen = [name for name, p in views.items() if not p.requires_grad]
    if any(not torch.equal(views[name].cpu(), files[name]) for name in frozen):
        raise ServedWeightsDiffer(
            "the server holds an earlier run's weights in layers that this run does not train "
            "(grpo.train_layer_indices); restart the server, so that it loads its model again"
        )
    trained = [name for name, p in views.items() if p.requires_grad]
    for name, master in zip(trained, optimizer.masters, strict=True):
        master.copy_(files[name])
