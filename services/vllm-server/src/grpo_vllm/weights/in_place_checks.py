"""What vLLM was told to do with weights that keeps a trainer from writing them in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

OTHER_MODES = "use --weight-bridge-mode lora_only or none"
NAMED_LAYERS = 3


@dataclass(frozen=True)
class LayoutFacts:
    """`grpo_vllm.engine.vllm_compat.layout_facts` reads them off vLLM. What is left out is off.

    `quantization`: the method's name; `parallel_sizes`: field of vLLM's configuration → workers;
    `draft`: the method of speculative decoding, where that has weights of its own;
    `special_layers`: layer → the class that serves it, of those that are not plain.
    """

    quantization: str | None = None
    latent_attention: bool = False
    experts: int = 0
    parallel_sizes: Mapping[str, int] = field(default_factory=dict)
    expert_parallel: bool = False
    sleep_mode: bool = False
    cumem_allocator: bool = False
    uva_offload_gb: float = 0.0
    prefetch_offload_groups: int = 0
    draft: str | None = None
    special_layers: Mapping[str, str] = field(default_factory=dict)


def why_not_shareable(facts: LayoutFacts) -> list[str]:
    """A line for everything that stands against sharing, with what to do about it; [] for
    nothing."""
    return [
        *_of_the_model(facts),
        *_of_the_workers(facts),
        *_of_the_memory(facts),
    ]


def _of_the_model(facts: LayoutFacts) -> Iterator[str]:
    if facts.quantization is not None:
        yield (
            f"quantised weights ({facts.quantization}): the server keeps them in its own form; "
            f"serve the checkpoint that they were made from, or {OTHER_MODES}"
        )
    if facts.latent_attention:
        yield (
            "multi-head latent attention (MLA): the server computes with copies of the weights, "
            f"made when it starts; {OTHER_MODES}"
        )
    if facts.experts:
        yield (
            f"mixture of experts ({facts.experts}): the server lays the experts' weights out for "
            f"its kernels; {OTHER_MODES}"
        )
    if facts.draft is not None:
        yield (
            f"speculative decoding ({facts.draft}): the draft's weights would not follow the "
            f"trainer's; drop --speculative-config, or {OTHER_MODES}"
        )
    # The model as a whole is named above; what is left is a surprise.
    if facts.special_layers and not (facts.quantization or facts.latent_attention or facts.experts):
        yield (
            f"layers that keep weights in a form of their own ({_some(facts.special_layers)}); "
            f"{OTHER_MODES}"
        )


def _of_the_workers(facts: LayoutFacts) -> Iterator[str]:
    several = {name: size for name, size in facts.parallel_sizes.items() if size > 1}
    if several:
        flags = ", ".join(f"--{n.replace('_', '-')} {size}" for n, size in several.items())
        yield (
            f"several workers ({flags}): each holds a part or a copy, and a trainer writes one; "
            f"drop the flags, or {OTHER_MODES}"
        )
    if facts.expert_parallel:
        yield "--enable-expert-parallel: a trainer writes one worker's weights; drop it"


def _of_the_memory(facts: LayoutFacts) -> Iterator[str]:
    if facts.sleep_mode:
        yield (
            "--enable-sleep-mode: a server that sleeps gives the memory of its weights away, and "
            "that memory cannot be handed to another process; drop it"
        )
    elif facts.cumem_allocator:
        yield ("--enable-cumem-allocator: its memory cannot be handed to another process; drop it")
    if facts.uva_offload_gb > 0:
        yield (
            f"--cpu-offload-gb {facts.uva_offload_gb:g}: weights lie in the host's memory instead "
            "of the GPU's; drop it, or serve a smaller model"
        )
    if facts.prefetch_offload_groups > 0:
        yield (
            f"--offload-group-size {facts.prefetch_offload_groups}: layers are copied into the GPU "
            "when their turn comes; drop it, or serve a smaller model"
        )


def _some(layers: Mapping[str, str]) -> str:
    named = [f"{name}: {served_by}" for name, served_by in list(layers.items())[:NAMED_LAYERS]]
    left = len(layers) - len(named)
    return ", ".join([*named, f"and {left} more"] if left else named)
