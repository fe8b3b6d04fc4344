"""Runs the code that torch.compile generates for an H100 on tensors without memory (device meta).

Inductor generates its Triton kernels as it would for the GPU, and so does the code that calls them.
A kernel is replaced by what it reads and writes; products and attention stay operators.

A layer is traced on the CPU and lowered for cuda: on a build without CUDA, autograd refuses the
device cuda, and operators on meta would leave no trace.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo import device_interface
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

Count = Callable[[str, int], None]
"""Is called for each launch: the kernel's name, and the bytes that it reads and writes."""

H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    warp_size=32,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232_448,
)
CACHED_ROW = 50 * 2**20 // (132 * 2)
"""Bytes of a row that a kernel reads again from the cache: the share of one of two blocks on each
multiprocessor."""
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)
_SIGNATURE = re.compile(r"^def \w+\((.*)\):$", re.MULTILINE)
_ACCESS = re.compile(r"tl\.(load|store|atomic_add)\((\w+) \+ ")


def _always(value: object) -> Any:
    return staticmethod(lambda *_, **__: value)


class _H100Interface(device_interface.CudaInterface):
    """What torch's compiler asks about its device."""

    class Worker(device_interface.CudaInterface.Worker):
        current_device = _always(0)
        get_device_properties = _always(H100)

    current_device = _always(0)
    get_compute_capability = _always(90)
    get_device_properties = _always(H100)
    is_available = _always(True)
    is_bf16_supported = _always(True)
    raise_if_triton_unavailable = _always(None)


class GeneratedKernel:
    """Counts instead of computing.

    Args: source: Triton code of inductor; pointers are its arguments whose name contains ptr
    """

    def __init__(self, name: str, source: str, count: Count) -> None:
        self._name, self._count = name.removeprefix("triton_"), count
        signature = _SIGNATURE.search(source)
        assert signature is not None
        self._parameters = [one.split(":")[0].strip() for one in signature[1].split(",")]
        self._accesses, self._has_loops = _accesses(source[signature.end() :])

    def run(self, *arguments: Any, **_: Any) -> None:
        named = dict(zip(self._parameters, arguments, strict=False))
        sizes = {name: size for name, size in named.items() if name.endswith("numel")}
        rows = math.prod(size for name, size in sizes.items() if name[0] != "r")
        elements = math.prod(sizes.values())
        total = 0
        for (pointer, _operation), loops in self._accesses.items():
            tensor = named[pointer]
            each = []
            for loop, number in loops.items():
                is_outside = self._has_loops and not loop  # once for each row
                accessed = number * (rows if is_outside else elements) * tensor.itemsize
                each.append(min(accessed, tensor.nbytes))
            is_cached = elements // max(rows, 1) * tensor.itemsize <= CACHED_ROW
            total += max(each) if is_cached else sum(each)
        self._count(self._name, total)


def _accesses(body: str) -> tuple[dict[tuple[str, str], Counter[int]], bool]:
    """How often a kernel accesses memory in each loop, by pointer and operation; and whether it has
    loops. Two loops over one row read it twice. Loop 0: outside of them."""
    found: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    loops, loop, depth = 0, 0, 0
    for line in filter(str.strip, body.splitlines()):
        indent = len(line) - len(line.lstrip())
        if loop and indent <= depth:
            loop = 0
        if line.lstrip().startswith("for ") and not loop:
            loops += 1
            loop, depth = loops, indent
        for operation, pointer in _ACCESS.findall(line):
            both = ("load", "store") if operation == "atomic_add" else (operation,)
            for one in both:
                found[pointer, one][loop] += 1
    return found, loops > 0


@contextlib.contextmanager
def compiled_for_h100(count: Count) -> Iterator[None]:
    """In this context, torch.compile compiles functions of tensors on meta as for an H100."""
    from torch._inductor import compile_fx, config, scheduler
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.fx_passes import reinplace

    compile_function = compile_fx.compile_fx

    def kernel(_: object, name: str, source: str, **__: object) -> GeneratedKernel:
        return GeneratedKernel(name, source, count)

    def compile_passes(graph: fx.GraphModule, inputs: list[Any], **__: object) -> Any:
        fakes = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
        with _disable_current_modes():
            _move(graph, _CPU)
            moved = [
                fake if isinstance(fake, Tensor) and fake.ndim else given
                for fake, given in zip(_on(_CPU, fakes), inputs, strict=True)
            ]
            return compile_function(graph, moved, inner_compile=compile_pass)

    def compile_pass(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        with _disable_current_modes():
            _move(graph, _CUDA)
            return compile_fx.compile_fx_inner(graph, _on(_CUDA, inputs), **options)

    device_interface.get_interface_for_device("cpu")  # fills the table
    interfaces = {"cuda": _H100Interface, "cuda:0": _H100Interface}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory())
        stack.enter_context(patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": directory}))
        stack.enter_context(config.patch(force_disable_caches=True, compile_threads=1))
        stack.enter_context(patch.dict(device_interface.device_interfaces, interfaces))
        for target, name, stub in (
            (compile_fx, "compile_fx", compile_passes),
            (AsyncCompile, "triton", kernel),
            (torch.utils._triton, "triton_hash_with_backend", _always("")),
            (scheduler, "has_triton", _always(True)),  # may have been asked before, and is cached
            (reinplace, "_inplace_generalized_scatter", lambda whole, *_: whole),
            (torch.cuda, "_DeviceGuard", _always(contextlib.nullcontext())),
            (torch.cuda, "set_device", _always(None)),
            (torch.cuda, "get_device_properties", _always(H100)),
            (torch._C, "_cuda_getCurrentRawStream", _always(0)),
            (torch._C._dynamo.guards, "_empty_strided_cuda", _empty_on_meta),
        ):
            stack.enter_context(patch.object(target, name, stub, create=True))
        torch._dynamo.reset()
        try:
            yield
        finally:
            torch._dynamo.reset()


def _move(graph: fx.GraphModule, device: torch.device) -> None:
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}


def _on(device: torch.device, inputs: list[Any]) -> list[Any]:
    """The same fake tensors on this device."""
    mode = detect_fake_mode(inputs)
    assert mode is not None
    with mode:
        return [
            torch.empty_strided(
                *(one.shape, one.stride()),
                dtype=one.dtype,
                device=device,
                requires_grad=one.requires_grad,
            )
            if isinstance(one, Tensor) and one.ndim  # others are numbers of the host
            else one
            for one in inputs
        ]


def _empty_on_meta(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")
