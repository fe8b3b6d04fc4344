"""What vLLM computes differently on a CPU: LoRA adapters, and attention over small KV blocks.

`CpuAdapters` computes y += scale · (x Aᵀ) Bᵀ for the rows of each adapter. It replaces vLLM's
`PunicaWrapperCPU` (0.32), which has three faults:

- It copies A and B once for each row of the batch, which takes most of the time of a decoding pass.
- In a pass with and without adapters, rows without one get the adapter in the last slot.
- It applies the rows of the sampled tokens to the logits of prompt tokens: one request for
  `prompt_logprobs` in a pass with sampling requests ends the engine with "einsum(): subscript b
  has size …". Models with `embedding_modules`, such as Llama, are affected. See `add_lora_logits`.

`SmallBlocks` offers blocks of the KV cache of 16 tokens, so that completions share more of their
prompt. vLLM shares whole blocks only, and its default of 128 tokens on a CPU is longer than many
prompts. Its kernels also compute smaller blocks, but its backend does not offer them.

`WorkerGroup` removes the names of the memory in which workers add up their results. vLLM keeps the
names, so the memory of a killed worker would stay in /dev/shm.

Legend: T rows (tokens) of a pass, r rank, S slots for adapters.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import CpuArchEnum, current_platform
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from grpo_core.tree.server import SHARED_MEMORY

_SMALLEST = 16
_SMALLEST_EVERYWHERE = 32
"""Kernels of other processors, and the AMX kernel, need multiples of 32."""


class WorkerGroup(CpuCommunicator):  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        group = getattr(self.dist_module, "group_name", None)
        if group is not None:  # all workers have opened it
            (SHARED_MEMORY / f"{group}_{self.rank}").unlink(missing_ok=True)


class SmallBlocks(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        del kv_cache_spec
        return [MultipleOf(smallest_block())]


def smallest_block() -> int:
    """The smallest block that the kernels of this CPU compute, in tokens."""
    is_x86 = current_platform.get_cpu_architecture() == CpuArchEnum.X86
    has_amx = torch.cpu._is_amx_tile_supported()
    return _SMALLEST if is_x86 and not has_amx else _SMALLEST_EVERYWHERE


class CpuAdapters(PunicaWrapperCPU):  # type: ignore[misc]
    """Keeps, for the current pass, the rows sorted by slot. The tensors keep their place in memory,
    because compiled code holds them.

    `_rows`: [T] int64, row numbers: first those without an adapter, then those of each slot
    `_ends`: [S + 1] int64, where in `_rows` each of these parts ends
    """

    def __init__(self, max_num_batched_tokens: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, *args, **kwargs)
        self._rows = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._ends = torch.zeros(kwargs["lora_config"].max_loras + 1, dtype=torch.int64)

    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        slots = self.token_lora_indices  # [T], -1 without an adapter
        self._rows[: len(slots)] = slots.argsort(stable=True)
        self._ends.copy_(torch.bincount(slots + 1, minlength=len(self._ends)).cumsum(0))

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Add to each row of `y` what its adapter computes from `x`.

        Args:
            y: [T, sum(output_slices)], changed in place
            x: [T, in]
            lora_a_stacked: for each slice [S, 1, r, in]
            lora_b_stacked: for each slice [S, 1, out, r]
        """
        del kwargs
        torch.ops.vllm.grpo_add_adapters(
            y.view(-1, y.shape[-1]),
            x.view(-1, x.shape[-1]),
            list(lora_a_stacked),
            list(lora_b_stacked),
            list(output_slices),
            scale,
            self._rows,
            self._ends,
        )

    def add_lora_logits(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: our server refuses adapters on `lm_head` (`require_servable_adapter`). vLLM
        passes the rows of sampled or of prompt tokens without saying which."""


def _add_adapters(
    y: Tensor,
    x: Tensor,
    a_stacked: list[Tensor],
    b_stacked: list[Tensor],
    output_slices: list[int],
    scale: float,
    rows: Tensor,
    ends: Tensor,
) -> None:
    """y += scale · (x Aᵀ) Bᵀ with the adapter of each slot, in the data type of the model. That of
    the adapter may differ (--lora-dtype)."""
    for slot, (start, end) in enumerate(pairwise(ends.tolist())):
        if start == end:
            continue
        own = None if end - start == len(x) else rows[start:end]  # None: all rows
        part, given = (y, x) if own is None else (y[own], x[own])
        at = 0
        for a, b, size in zip(a_stacked, b_stacked, output_slices, strict=True):
            low = given @ a[slot, 0].to(x.dtype).T  # [rows, r]
            part[:, at : at + size].addmm_(low, b[slot, 0].to(x.dtype).T, alpha=scale)
            at += size
        if own is not None:
            y[own] = part


direct_register_custom_op(
    "grpo_add_adapters",
    _add_adapters,
    mutates_args=["y"],
    fake_impl=lambda *_: None,  # the compiler needs only shapes, and y keeps its own
    dispatch_key="CPU",
)
