"""The policy: a causal language model of transformers, with or without an adapter; and its layers,
which may be frozen, recomputed in the backward pass, or compiled."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, cast

import structlog
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_core.tree.trainer import Choice, TrainerSettings
from grpo_trainer.data.groups import GroupLimits
from grpo_trainer.errors import FastPathRefused, MissingPackage, PolicyMismatch

log = structlog.get_logger()

_LISTS = ("layers", "h")
"""Names of the list of layers in transformers' decoders; GPT-2 and Falcon call it h."""
_COMPILERS = {"cpu": ("CXX", "g++", "clang++"), "cuda": ("CC", "gcc", "clang")}
"""For each type of device: the variable that names a compiler, and the names to look for without
it. On a GPU, Triton compiles kernels, and a C compiler compiles the code that launches them."""
_COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that names torch's directory for compiled code."""


class CausalOutput(Protocol):
    """The part of a model call's result that the trainer reads."""

    logits: Tensor  # [B, T, V]


class CausalLM(Protocol):
    """The methods of a policy that the trainer uses. An `nn.Module`; PEFT's wrapper
    forwards them."""

    config: Any
    generation_config: Any

    def __call__(self, **model_inputs: Any) -> CausalOutput: ...

    def eval(self) -> Self: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def get_submodule(self, target: str) -> nn.Module: ...

    def get_decoder(self) -> nn.Module: ...

    def get_output_embeddings(self) -> nn.Module: ...

    def _set_gradient_checkpointing(
        self, enable: bool, gradient_checkpointing_func: Callable[..., Any]
    ) -> None: ...

    def set_attn_implementation(self, name: str) -> None: ...

    def save_pretrained(self, directory: str | Path, **options: Any) -> object: ...


def device_of(policy: CausalLM) -> torch.device:
    """The device of the policy's weights; its inputs must be there too."""
    return next(policy.parameters()).device


def base_model(policy: CausalLM) -> CausalLM:
    """The transformers model without PEFT's wrapper. The adapter's layers are part of it."""
    # Only PEFT's wrapper has this method. Checking for its class would import PEFT without need.
    unwrapped = getattr(policy, "get_base_model", None)
    return policy if unwrapped is None else cast(CausalLM, unwrapped())


def text_config_of(policy: CausalLM) -> Any:
    """The configuration of the language model; models that also take images nest it."""
    return policy.config.get_text_config()


def attention_widths(config: Any) -> Iterator[tuple[int, int]]:
    """Of each layer: widths of the queries of all heads together, and of the keys; 0 if it is
    recurrent. Args: config: of the language model"""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    layers = getattr(config, "per_layer_config", None) or [config] * len(kinds)
    for kind, layer in zip(kinds, layers, strict=False):
        has_heads = hasattr(layer, "num_attention_heads") and kind != "linear_attention"
        yield _head_widths(layer) if has_heads else (0, 0)


def _head_widths(config: Any) -> tuple[int, int]:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * width, (getattr(config, "num_key_value_heads", None) or heads) * width


def vocabulary_of(policy: CausalLM) -> int:
    """Number of token ids."""
    return int(text_config_of(policy).vocab_size)


def require_known(token_ids: Iterable[int], policy: CausalLM) -> None:
    """Raises `PolicyMismatch`: the embedding has no row for a token of the tokenizer."""
    largest, size = max(token_ids, default=0), vocabulary_of(policy)
    if largest >= size:
        raise PolicyMismatch(
            f"the tokenizer has token id {largest}, but the model's vocabulary (vocab_size, the "
            f"embedding's rows) has {size} tokens; use the tokenizer that belongs to the model, or "
            "enlarge the embedding (transformers' resize_token_embeddings)"
        )


def end_tokens_of(policy: CausalLM) -> frozenset[int]:
    """Token ids that end a completion; empty if the model names none."""
    configs = (base_model(policy).generation_config, policy.config, text_config_of(policy))
    named = (getattr(config, "eos_token_id", None) for config in configs)
    ends = next((found for found in named if found is not None), ())
    return frozenset([ends] if isinstance(ends, int) else ends)


def limits_of(policy: CausalLM, settings: TrainerSettings) -> GroupLimits:
    """What groups must keep to, so that the policy can be trained on them."""
    return GroupLimits(
        vocabulary_of(policy),
        settings.seq_len,
        settings.recompute_logprobs,
        end_tokens_of(policy),
        needs_teacher=settings.resolved_objective.distill_coef > 0,
    )


def layers_of(model: CausalLM) -> nn.ModuleList | None:
    """The layers, or None if the model has no list of them.

    Args:
        model: the transformers model, without an adapter's wrapper
    """
    decoder = model.get_decoder()
    found = (getattr(decoder, name, None) for name in _LISTS)
    return next((layers for layers in found if isinstance(layers, nn.ModuleList)), None)


def train_only(model: CausalLM, indices: tuple[int, ...]) -> None:
    """Freeze every parameter outside the layers with these indices. A frozen parameter has no
    gradient, and the optimizer does not include it.

    Raises:
        PolicyMismatch: the model has no such layers; names all of them.
    """
    layers = layers_of(model)
    if layers is None:
        raise PolicyMismatch(
            f"--train-layer-indices: {type(model).__name__} has no list of layers; omit the option"
        )
    beyond = [index for index in indices if index >= len(layers)]
    if beyond:
        raise PolicyMismatch(
            f"--train-layer-indices {beyond}: the model has layers 0 to {len(layers) - 1}"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for index in indices:
        layers[index].requires_grad_(True)


def middle(tensor: Tensor, elements: int) -> Tensor:
    """[n ≤ elements] Some elements in the middle: the first row of an embedding may never be
    trained."""
    start = max(0, tensor.numel() - elements) // 2
    return tensor.reshape(-1)[start : start + elements]


def prepare_recomputing(model: CausalLM) -> None:
    """Call this once before `recomputing`. It changes nothing yet.

    Args:
        model: the transformers model, without an adapter's wrapper

    Raises:
        FastPathRefused: the model does not support it.
    """
    if layers_of(model) is None or not getattr(model, "supports_gradient_checkpointing", False):
        raise FastPathRefused(
            f"--gradient-checkpointing: {type(model).__name__} does not support it; omit the option"
        )
    model._set_gradient_checkpointing(True, _checkpointed)


@contextlib.contextmanager
def recomputing(model: CausalLM) -> Iterator[None]:
    """Compute each layer that is called in this context again in the backward pass, instead of
    storing its activations (arXiv 1604.06174).

    transformers recomputes layers in training mode only, and drops their cache. So a layer is in
    training mode from here to its call and no longer: neither what it computes nor what is sampled
    with the model may depend on it.

    Args:
        model: the transformers model that was given to `prepare_recomputing`
    """
    layers = layers_of(model)
    assert layers is not None
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _checkpointed(run: partial[Tensor], *inputs: Tensor) -> Tensor:
    """Args: run: the call of a layer, as transformers' `GradientCheckpointingLayer` passes it"""
    # transformers 5.24 passes the function of the class, and the layer as its first argument.
    layer = getattr(run.func, "__self__", None) or run.args[0]
    layer.training = False
    return checkpoint(run, *inputs, use_reentrant=False)  # type: ignore[no-any-return]


def missing_compiler(device_type: str) -> str | None:
    """What torch.compile needs on a device of this type and does not find; None if it finds all."""
    variable, *names = _COMPILERS[device_type]
    candidates = [os.environ[variable]] if os.environ.get(variable) else names
    if not any(shutil.which(name) for name in candidates):
        return (
            f"a compiler on {device_type}, but there is no {' or '.join(candidates)}: run apt-get "
            f"install build-essential, name a compiler in ${variable}"
        )
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton on cuda, but it is not installed: run pip install triton"
    return None


def compile_choice(typed: bool | None, device_type: str, missing: str | None) -> Choice:
    """auto: compile the layers, unless that fails.

    Args:
        typed: --compile or --no-compile; None: neither, so a GPU compiles and a CPU does not
        missing: see `missing_compiler`

    Raises:
        MissingPackage: torch.compile would fail in the first step, and --compile was typed.
    """
    if typed is False or (typed is None and device_type != "cuda"):
        return "off"
    if not missing:
        return "on" if typed else "auto"
    if typed:
        raise MissingPackage(f"--compile needs {missing}, or omit --compile")
    reason = f"torch.compile needs {missing}, or pass --no-compile"
    log.warning("fast_path.refused", option="--compile", reason=reason)
    return "off"


def compile_layers(model: CausalLM, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer with torch.compile when it is first called: one short compilation serves
    all equal layers. The modules and their parameters stay the same objects, so views into shared
    memory keep their addresses, and gradient hooks still run.

    Args:
        model: the transformers model, without an adapter's wrapper
        backend: of torch.compile

    Raises:
        FastPathRefused: the model has no list of layers.
    """
    layers = layers_of(model)
    if layers is None:
        raise FastPathRefused(f"{type(model).__name__} has no list of layers")
    _keep_compiled_code()
    for layer in layers:
        # Dynamic shapes, because lengths differ between batches: one compilation serves all of
        # them.
        layer.compile(dynamic=True, backend=backend)


def undo_compiling(model: CausalLM) -> None:
    """Make the layers as they were before `compile_layers`."""
    for layer in layers_of(model) or ():
        layer._compiled_call_impl = None


def uncompiled() -> AbstractContextManager[None]:
    """A context in which compiled layers run as if they were not: for calls that differ from those
    of the training step, each kind of which would be compiled for seconds."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _keep_compiled_code() -> None:
    """For the next run: by default it lies below /tmp. The directory that the user names wins."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # The import of torch's compiler has set the variable to the default.
    if os.environ.get(_COMPILED_CODE) in (None, default_cache_dir()):
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        os.environ[_COMPILED_CODE] = str(Path(caches, "grpo", "torchinductor"))
