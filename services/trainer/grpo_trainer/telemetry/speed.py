"""How fast a step computes: its tokens per second, and the share of the device's rate that the
model needs (MFU, arXiv 2204.02311 appendix B)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import structlog
import torch
from torch import nn
from torch.utils.benchmark import Timer

from grpo_trainer.data.collate import Batch, MicroBatch
from grpo_trainer.model import onednn
from grpo_trainer.model.policy import (
    CausalLM,
    attention_widths,
    base_model,
    device_of,
    layers_of,
    text_config_of,
)
from grpo_trainer.ranks import Ranks

log = structlog.get_logger()

PRODUCT_SIZE = {"cuda": 4096, "cpu": 1024}
MEASURED_S = 0.2


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations that the training of a model needs.

    A weight of a matrix product needs 2 per token in the forward pass, 2 for the gradient of its
    input, and 2 for its own gradient: 6 (arXiv 2001.08361, section 2.1). A frozen weight needs 4;
    below the lowest trained layer, 2. Of experts, those count that a token passes. An embedding is
    no product, unless the head has the same weights.

    In each layer of attention, a token needs 12 x the width of all heads for each token that it
    sees, itself included (arXiv 2204.02311, appendix B); below the lowest trained layer, 4.

    Not counted: layers that are computed again, a reference model, and a second pass without
    dropout. Tokens outside a sliding window count as seen.

    Args:
        of_token: for a token, without head and attention
        of_target: of the head, for a trained token
        of_view: of the attention of all layers, for a token that sees one token
    """

    of_token: float
    of_target: float
    of_view: float

    @classmethod
    def of(cls, policy: CausalLM) -> ModelFlops:
        model, config = base_model(policy), text_config_of(policy)
        layers, head = [*(layers_of(model) or ())], {*model.get_output_embeddings().parameters()}
        decoder: Any = model.get_decoder() if layers else model  # without parts that see images
        below = [*takewhile(lambda layer: not _is_trained(layer), layers)]
        without_gradient = {p for layer in below for p in layer.parameters()}
        looked_up = {m.weight for m in decoder.modules() if isinstance(m, nn.Embedding)}
        used_experts = getattr(config, "num_experts_per_tok", None)

        def flops(weights: Iterable[nn.Parameter]) -> float:
            total = 0.0
            for weight in weights:
                is_product = weight.dim() > 1
                share = used_experts / len(weight) if used_experts and weight.dim() == 3 else 1
                backward = 2 * (weight not in without_gradient) + 2 * weight.requires_grad
                total += is_product * share * weight.numel() * (2 + backward)
            return total

        widths = [queries for queries, _ in attention_widths(config)]
        return cls(
            of_token=flops({*decoder.parameters()} - looked_up - head),
            of_target=flops(head),
            of_view=12 * sum(widths) - 8 * sum(widths[: len(below)]),
        )

    def of_micro_batch(self, micro: MicroBatch) -> float:
        """Of what must be computed: all tokens but padding and the beginning that a sequence shares
        with the previous one, and logits of the trained tokens alone."""
        tokens, views, targets = 0, 0, len(micro.trained()[0])
        for length, shared in zip(micro.lengths, micro.shared, strict=True):
            tokens += length - shared
            views += (length * (length + 1) - shared * (shared + 1)) // 2
        return self.of_token * tokens + self.of_target * targets + self.of_view * views


def _is_trained(layer: nn.Module) -> bool:
    return any(p.requires_grad for p in layer.parameters())


@dataclass(frozen=True)
class Speed:
    """Args: rate: of the matrix products of all ranks together, in FLOP/s"""

    flops: ModelFlops
    rate: float
    ranks: int = 1

    @classmethod
    def measured(cls, policy: CausalLM, ranks: Ranks) -> Speed:
        """Other ranks are taken to be as fast as this one."""
        dtype = next(policy.parameters()).dtype
        rate = product_rate(device_of(policy), dtype)
        log.info(
            "device.rate",
            tflops=float(f"{rate / 1e12:.3g}"),
            dtype=str(dtype).split(".")[1],
            cpu_threads=torch.get_num_threads(),
        )
        return cls(ModelFlops.of(policy), rate * ranks.count, ranks.count)

    def metrics(self, batch: Batch, compute_s: float) -> dict[str, float | None]:
        flops = [self.flops.of_micro_batch(micro) for micro in batch.micro_batches]
        return {
            "train/tokens_per_s": batch.tokens / compute_s,
            "train/mfu": sum(flops) / compute_s / self.rate,
            "train/device_tflops": self.rate / 1e12,
            "train/rank_idle_fraction": idle_fraction(flops, self.ranks)
            if self.ranks > 1
            else None,
        }


def idle_fraction(costs: Sequence[float], ranks: int) -> float:
    """Share of the ranks' time in which they wait for the costliest micro-batch of a round, if time
    is as the cost. Args: costs: of the micro-batches, as `Ranks.portion` divides them"""
    rounds = [costs[start : start + ranks] for start in range(0, len(costs), ranks)]
    return 1 - sum(costs) / (ranks * sum(map(max, rounds)))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on this process's threads, as the model's layers compute
    it."""
    size, generator = PRODUCT_SIZE[device.type], torch.Generator(device).manual_seed(0)
    # A product of zeros is faster than one of random numbers.
    factors = {
        name: torch.randn(size, size, generator=generator, device=device, dtype=dtype)
        for name in "ab"
    }
    timer = Timer(
        "linear(a, b)",
        globals={"linear": onednn.linear, **factors},
        num_threads=torch.get_num_threads(),
    )
    return 2 * size**3 / timer.blocked_autorange(min_run_time=MEASURED_S).median
