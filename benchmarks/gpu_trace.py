"""Counts what a training step launches on a GPU, on a machine without one:

    python -m benchmarks.gpu_trace --shape 0.5b --layout packed --head fused

The trainer's own step runs on tensors without memory (device meta) and takes the paths of a GPU.
Every operator, or generated kernel of the compiled layers and head, is counted with its bytes and
floating-point operations, and so is each time that the host waits for the device. A roofline
predicts the step's time: an operator takes the longest of its bytes and its operations at the rates
of an H100, and the host must launch each.

Not seen: how well single kernels use the card (on an H100 they reached about 0.7 of these rates),
the host's time for guards of compiled code, and kernels of bitsandbytes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu_bench.models import SHAPES, ShapeName, random_policy, train_flops, work_on
from benchmarks.gpu_bench.training import random_batch
from benchmarks.gpu_compiled import compiled_for_h100
from benchmarks.report import number, publish, table
from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.data.collate import Batch, MicroBatch
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.adapter import with_adapter
from grpo_trainer.model.forward import FastForward
from grpo_trainer.model.fused_head import EAGER, HeadArithmetic
from grpo_trainer.model.packed_attention import Flash, enable
from grpo_trainer.model.packing import PACKED, PADDED
from grpo_trainer.model.policy import base_model, compile_layers
from grpo_trainer.optim.master_optimizer import build_optimizer
from grpo_trainer.optim.master_update import BucketPart
from grpo_trainer.optim.rules import MAP_VALUES

BYTES_PER_S, FLOPS_PER_S = 3.03e12, 790e12
"""Measured on an H100, with bfloat16; see the section "GPU: 0.5b" of the results."""
FLOAT32_FLOPS_PER_S = 67e12
"""Of the H100's datasheet: true float32, as torch multiplies by default."""
ATTENTION_FLOPS_PER_S = 350e12
"""Of FlashAttention-2, which torch calls: 35 % of the datasheet (arXiv 2407.08608, abstract)."""
REACHED = 0.7
"""Share of these rates that kernels reached on an H100."""
KERNEL_S, LAUNCH_S = 2e-6, 7e-6
"""Assumed: the shortest kernel, and the host's time to launch one."""
META = torch.device("meta")
FOREACH_CHUNK, FOREACH_BLOCKS = 65_536, 320
"""torch's kernels for lists of tensors: elements of a block, and blocks of a launch."""
CAT_INPUTS = 128
"""Tensors that one launch of `cat` copies."""
MODES = {False: "shared_vllm", True: "lora_only"}
GRADIENTS, OPTIMIZER, WRITE = PHASES = ("gradients", "optimizer", "write")
aten = torch.ops.aten
ATTENTION = {"torch_attn._varlen_attn": 4, "torch_attn._varlen_attn_backward": 10}
"""Floating-point operations for each query, key that it sees, and channel of a head."""
_VIEWS = (
    *("view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "detach", "permute"),
    *("unsqueeze", "squeeze", "alias", "split", "as_strided", "reshape", "unbind", "narrow"),
    *("_reshape_alias", "split_with_sizes", "lift_fresh", "unfold", "diagonal", "view_as", "chunk"),
    *("set_", "squeeze_", "unsqueeze_", "t_", "empty", "empty_like", "new_empty", "empty_strided"),
)
FREE = {getattr(aten, name) for name in _VIEWS}
"""Operators that launch nothing."""
_CHANGES = ("add_", "sub_", "mul_", "div_", "exp_", "square_", "addmm_", "_foreach_mul_")
CHANGES = {getattr(aten, name) for name in _CHANGES}
"""Operators that read what they overwrite."""


@dataclass
class Kind:
    """All calls of one operator in one phase."""

    launches: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass
class Counts:
    """`waits`: of the host, by the operator that caused them."""

    kinds: dict[str, Kind] = field(default_factory=lambda: defaultdict(Kind))
    waits: Counter[str] = field(default_factory=Counter)

    def total(self, name: str) -> float:
        """Sum of a field of `Kind` over all operators."""
        found: float = sum(getattr(kind, name) for kind in self.kinds.values())
        return found

    def seconds_at(self, reached: float) -> float:
        """The longer one of the device's time and the host's. Args: reached: share of the rates"""
        return max(self.total("seconds") / reached, self.total("launches") * LAUNCH_S)


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators on the device meta.

    Args: micro_batches: attention over packed sequences cannot be counted without their lengths
    """

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = {own_tokens(micro): _seen_keys(micro) for micro in micro_batches}
        self.phases: dict[str, Counts] = defaultdict(Counts)
        self.phase = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as compiled, and its operators are counted."""
        return True

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operator, inputs = function._overloadpacket, list(_tensors((args, kwargs)))
        if (found := self._waited(operator, kwargs, inputs)) is not None:
            return found
        result = function(*args, **kwargs)
        outputs = list(_tensors(result))
        if (
            operator is aten._to_copy
            and any(t.is_meta for t in outputs)
            and not (inputs[0].is_meta or kwargs.get("non_blocking"))
        ):
            self.phases[self.phase].waits["upload"] += 1
        if operator not in FREE and any(t.is_meta for t in (*inputs, *outputs)):
            self._add(operator, inputs, outputs, self._flops(operator, args, kwargs, result))
        return result

    def _flops(self, operator: Any, args: Any, kwargs: Any, result: Any) -> int:
        if per_key := ATTENTION.get(_name(operator)):
            tokens, heads, width = args[0].shape
            return int(per_key * heads * width * self._seen[tokens])
        flops = flop_registry.get(operator)
        shaped = (arg for arg in args if not isinstance(arg, torch.dtype))
        return int(flops(*shaped, **kwargs, out_val=result)) if flops else 0

    def _waited(self, operator: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """The result of an operator that copies from the device to the host, or None."""
        first = inputs[0] if inputs else None
        if first is None or not first.is_meta:
            return None
        to = kwargs.get("device")
        if operator is aten._local_scalar_dense:
            found: Any = 1.0 if first.is_floating_point() else 1
        elif operator is aten._to_copy and to is not None and torch.device(to).type == "cpu":
            found = torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype)
        else:
            return None
        self.phases[self.phase].waits[_name(operator)] += 1
        self._add(operator, inputs, [], 0)
        return found

    def kernel(self, part: BucketPart, *_: object) -> None:
        """Counts what `grpo_trainer.optim.kernel` reads and writes."""
        state = [tensor for tensor in part.state.values() if tensor.numel() > MAP_VALUES]
        twice = sum(tensor.nbytes for tensor in (part.master, *state))
        once = part.gradient.nbytes + (0 if part.staged is None else part.staged.nbytes)
        self.launched("adamw kernel", 2 * twice + once)

    def launched(
        self, name: str, size: int, flops: int = 0, seconds: float = 0, launches: int = 1
    ) -> None:
        """Counts launches that read and write `size` bytes. Args: seconds: of their operations"""
        kind = self.phases[self.phase].kinds[name]
        kind.launches += launches
        kind.bytes += size
        kind.flops += flops
        kind.seconds += max(size / BYTES_PER_S, seconds, KERNEL_S * launches)

    def _add(self, operator: Any, inputs: list[Tensor], outputs: list[Tensor], flops: int) -> None:
        both = [t for t in (*inputs, *outputs) if t.is_meta]
        places = {(id(t.untyped_storage()), t.storage_offset(), t.numel()): t.nbytes for t in both}
        size = sum(places.values())
        if operator in CHANGES:
            size += sum(tensor.nbytes for tensor in outputs)
        if operator in (aten.embedding, aten.index, aten.index_select):
            size = 2 * sum(t.nbytes for t in outputs)  # of the rows that are read
        name = _name(operator)
        seconds = flops / _flops_per_s(name, inputs)
        self.launched(name, size, flops, seconds, _launches(name, inputs, outputs))


def own_tokens(micro: MicroBatch) -> int:
    return sum(micro.lengths) - sum(micro.shared)


def _seen_keys(micro: MicroBatch) -> int:
    """Of all queries together: attention is causal, and shared beginnings have no queries."""
    both = zip(micro.lengths, micro.shared, strict=True)
    return sum((n * (n + 1) - m * (m + 1)) // 2 for n, m in both)


def _flops_per_s(name: str, inputs: list[Tensor]) -> float:
    if name in ATTENTION:
        return ATTENTION_FLOPS_PER_S
    types = {tensor.dtype for tensor in inputs if tensor.ndim > 1}
    return FLOAT32_FLOPS_PER_S if types <= {torch.float32} else FLOPS_PER_S


def _launches(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    if "foreach" in name:
        largest = outputs or inputs
        blocks = sum(-(-t.numel() // FOREACH_CHUNK) for t in largest)
        return -(-blocks // FOREACH_BLOCKS)
    return -(-len(inputs) // CAT_INPUTS) if name == "cat" else 1


def _name(operator: Any) -> str:
    return str(operator).removeprefix("aten.")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


@dataclass(frozen=True)
class Step:
    """What is traced. `options`: of the trainer, by the names of its settings."""

    shape: ShapeName
    layout: str = "packed"
    head: str = "fused"
    adapter: bool = False
    compiles: bool = True
    options: Mapping[str, object] = field(default_factory=dict)

    def batch(self) -> Batch:
        return random_batch(SHAPES[self.shape], work_on(self.shape, on_gpu=True), seed=0)


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Take the paths of a GPU with kernels for sequences of different lengths."""
    with patch.object(Flash, "on", lambda _: Flash(takes_fewer_heads=True)):
        yield


def traced(step: Step, batch: Batch) -> dict[str, Counts]:
    """The counts of each phase of the second step: the first one creates the moments."""
    fields = {"model": "random", "mode": MODES[step.adapter], "optimizer": "adamw"} | {
        **step.options
    }
    settings = CommandLine.model_validate(fields).settings()
    trace = Trace(batch.micro_batches)
    compiler = compiled_for_h100(trace.launched) if step.compiles else nullcontext()
    with _as_on_a_gpu(), compiler, trace:
        policy = random_policy(step.shape, torch.bfloat16, META)
        if step.adapter and settings.lora:
            policy = with_adapter(policy, settings.lora)
        if step.layout == "packed":
            enable(policy)
        head = None if step.head == "plain" else EAGER
        if step.compiles:
            compile_layers(base_model(policy))
            head = head and HeadArithmetic.compiled()
        forward = FastForward(PACKED if step.layout == "packed" else PADDED, head)
        optimizer = build_optimizer(policy, settings)
        optimizer.update.kernel = trace.kernel
        for number_ in range(2):
            trace.phases.clear()
            trace.phase = GRADIENTS
            accumulate_gradients(policy, batch, GRPO, number_, forward, optimizer)
            trace.phase = OPTIMIZER
            optimizer.step(number_)
            trace.phase = WRITE
            optimizer.write_into_parameters()
    return dict(trace.phases)


def lines(step: Step, batch: Batch, phases: Mapping[str, Counts], largest: int) -> list[str]:
    """Tables of the phases and of their largest operators."""
    lengths = [length for micro in batch.micro_batches for length in micro.lengths]
    rows = [["", "launches", "GB", "TFLOP", "device ms", "host ms", "waits"]]
    for phase in PHASES:
        counts = phases[phase]
        rows.append([phase, *_cells(counts), str(sum(counts.waits.values()))])
    operators = [["operator", "launches", "GB", "TFLOP", "device ms", "host ms"]]
    for phase in PHASES:
        kinds = sorted(phases[phase].kinds.items(), key=lambda item: -item[1].seconds)
        for name, kind in kinds[:largest]:
            operators.append([f"{phase}: {name}", *_cells(Counts({name: kind}))])
    total = sum(phases[phase].seconds_at(REACHED) for phase in PHASES)
    limit = train_flops(SHAPES[step.shape], lengths) / FLOPS_PER_S
    return [
        f"{step.shape}, {step.layout}, {step.head} head{', adapter' * step.adapter}, "
        f"{'compiled' if step.compiles else 'eager'}: {len(batch.micro_batches)} micro-batches, "
        f"{sum(lengths)} tokens",
        "",
        *table(rows),
        "",
        *table(operators),
        "",
        f"predicted, kernels at {REACHED:g} of the rates: {total * 1e3:.0f} ms, "
        f"{sum(lengths) / total:,.0f} tokens/s, {limit / total:.2f} of the rate of products",
    ]


def _cells(counts: Counts) -> Sequence[str]:
    launches = counts.total("launches")
    return (
        f"{launches:.0f}",
        number(counts.total("bytes") / 1e9),
        number(counts.total("flops") / 1e12),
        number(counts.total("seconds") * 1e3),
        number(launches * LAUNCH_S * 1e3),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=get_args(ShapeName), default="0.5b")
    parser.add_argument("--layout", choices=("packed", "padded"), default="packed")
    parser.add_argument("--head", choices=("fused", "plain"), default="fused")
    parser.add_argument("--adapter", action="store_true", help="train an adapter")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--largest", type=int, default=12, help="operators shown per phase")
    parser.add_argument("--results", type=Path, help="file in which to replace the section")
    given = parser.parse_args()
    step = Step(given.shape, given.layout, given.head, given.adapter, given.compile)
    batch = step.batch()
    publish(
        "GPU step, counted", lines(step, batch, traced(step, batch), given.largest), given.results
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
