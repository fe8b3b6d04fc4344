"""Finds options and layers of vLLM that prevent a trainer from writing weights in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

OTHER_MODES = "use --mode lora_only or none"
NAMED_LAYERS = 3


@dataclass(frozen=True)
class LayoutFacts:
    """vLLM's settings that affect the weights, read by `vllm_compat.layers.layout_facts`.

    `quantization`: the method's name; `parallel_sizes`: field of vLLM's configuration → workers;
    `draft`: the method of speculative decoding, if it has its own weights;
    `special_layers`: name of a layer that may change its weights' layout → its class.
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
    """One line for each obstacle to sharing, with its fix; [] if there is none."""
    return [
        *_of_the_model(facts),
        *_of_the_workers(facts),
        *_of_the_memory(facts),
    ]


def _of_the_model(facts: LayoutFacts) -> Iterator[str]:
    if facts.quantization is not None:
        yield (
            f"quantised weights ({facts.quantization}): vLLM stores these weights in its own form; "
            f"serve the original checkpoint, or {OTHER_MODES}"
        )
    if facts.latent_attention:
        yield (
            "multi-head latent attention (MLA): the server computes with copies of the weights, "
            f"which it makes at its start; {OTHER_MODES}"
        )
    if facts.experts:
        yield (
            f"mixture of experts ({facts.experts}): the server rearranges the experts' weights for "
            "its kernels; use --mode none, or on a GPU lora_only"
        )
    if facts.draft is not None:
        yield (
            f"speculative decoding ({facts.draft}): the trainer does not update the draft model; "
            f"remove --speculative-config, or {OTHER_MODES}"
        )
    # Layers of quantised, MLA and expert models are reported above as one obstacle.
    if facts.special_layers and not (facts.quantization or facts.latent_attention or facts.experts):
        yield (
            f"a trainer cannot write layers that store weights in their own form "
            f"({_some(facts.special_layers)}); "
            f"{OTHER_MODES}"
        )


def _of_the_workers(facts: LayoutFacts) -> Iterator[str]:
    several = {name: size for name, size in facts.parallel_sizes.items() if size > 1}
    if several:
        flags = ", ".join(f"--{n.replace('_', '-')} {size}" for n, size in several.items())
        yield (
            f"several workers ({flags}): a trainer writes only one worker's weights; remove these "
            f"options, or {OTHER_MODES}"
        )
    if facts.expert_parallel:
        yield (
            "--enable-expert-parallel: a trainer writes only one worker's weights; remove this "
            "option"
        )


def _of_the_memory(facts: LayoutFacts) -> Iterator[str]:
    if facts.sleep_mode:
        yield (
            "--enable-sleep-mode: other processes cannot share this memory, and sleeping would "
            "release it; remove this option"
        )
    elif facts.cumem_allocator:
        yield "--enable-cumem-allocator: other processes cannot share its memory; omit it"
    if facts.uva_offload_gb > 0:
        yield (
            f"--cpu-offload-gb {facts.uva_offload_gb:g}: weights are in the host's memory instead "
            "of the GPU's; remove this option, or serve a smaller model"
        )
    if facts.prefetch_offload_groups > 0:
        yield (
            f"--offload-group-size {facts.prefetch_offload_groups}: layers are copied to the GPU "
            "only when they are needed; remove this option, or serve a smaller model"
        )


def _some(layers: Mapping[str, str]) -> str:
    named = [f"{name}: {served_by}" for name, served_by in list(layers.items())[:NAMED_LAYERS]]
    left = len(layers) - len(named)
    return ", ".join([*named, f"and {left} more"] if left else named)
