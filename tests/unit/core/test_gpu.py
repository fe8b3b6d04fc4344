"""Errors of CUDA, torch and vLLM, with their own types and texts, become ours with what to do."""

from __future__ import annotations

import pytest
import torch

from grpo_core.errors import GrpoError
from grpo_core.gpu import (
    GpuFailed,
    GpuUnusable,
    NoSuchDevice,
    OutOfMemory,
    gpu_error,
    visible_gpu,
)

OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.25 GiB of "
    "which 3.25 GiB is free. Process 7 has 60.00 GiB memory in use. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
TAIL = """
Search for `cudaError' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
CUDA kernel errors might be asynchronously reported at some other API call.
"""


def cuda(text: str) -> RuntimeError:
    error: RuntimeError = torch.AcceleratorError(f"CUDA error: {text}{TAIL}")
    return error


@pytest.mark.parametrize(
    ("error", "ours", "advice"),
    [
        (OUT_OF_MEMORY, OutOfMemory, "use LESS"),
        (cuda("out of memory"), OutOfMemory, "use LESS"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`"),
            OutOfMemory,
            "use LESS",
        ),
        (
            ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_uti"),
            OutOfMemory,
            "raise --gpu-memory-utilization",
        ),
        (
            ValueError(
                "To serve at least one request with the model's max seq len (32768), (1.75 GiB KV "
                "cache is needed, which is larger than the available KV cache memory (0.5 GiB). "
            ),
            OutOfMemory,
            "lower --max-model-len",
        ),
        (
            ValueError(
                "Free memory on device cuda:0 (3.2/79.2 GiB) on startup is less than desired GPU "
                "memory utilization (0.9, 71.3 GiB). Decrease GPU memory utilization"
            ),
            OutOfMemory,
            "end other processes",
        ),
        (
            ValueError(
                "Available memory on node 0 (1/7 GiB) on startup is less than desired CPU memory"
            ),
            OutOfMemory,
            "lower --gpu-memory-utilization",
        ),
        (cuda("unspecified launch failure"), GpuFailed, "Xid in dmesg. GOES ON"),
        (cuda("unknown error"), GpuFailed, "Xid in dmesg. GOES ON"),
        (cuda("an illegal memory access was encountered"), GpuFailed, "CUDA_LAUNCH_BLOCKING=1"),
        (cuda("device-side assert triggered"), GpuFailed, "CUDA_LAUNCH_BLOCKING=1"),
        (cuda("uncorrectable ECC error encountered"), GpuFailed, "restart the host. GOES ON"),
        (RuntimeError("NVML: GPU is lost"), GpuFailed, "restart the host"),
        (
            cuda("CUDA-capable device(s) is/are busy or unavailable"),
            GpuUnusable,
            "--compute-mode=DEFAULT",
        ),
        (
            RuntimeError(
                "Unexpected error from cudaGetDeviceCount(). Error 805: MPS client failed to "
                "connect to the MPS control daemon or the MPS server"
            ),
            GpuUnusable,
            "needs no MPS",
        ),
        (
            RuntimeError(
                "The NVIDIA driver on your system is too old (found version 11040). Please update"
            ),
            GpuUnusable,
            "update the driver",
        ),
        (
            RuntimeError(
                "Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was "
                "attempted on non supported HW"
            ),
            GpuUnusable,
            "remove cuda-compat",
        ),
        (
            RuntimeError("Found no NVIDIA driver on your system. Please check that you have an"),
            GpuUnusable,
            "DEVICE=cpu",
        ),
        (RuntimeError("No CUDA GPUs are available"), GpuUnusable, "CUDA_VISIBLE_DEVICES"),
        (RuntimeError("Failed to infer device type, please set"), GpuUnusable, "nvidia-smi"),
        (
            AssertionError("Torch not compiled with CUDA enabled"),
            GpuUnusable,
            "make install DEVICE=cuda",
        ),
        (
            cuda("no kernel image is available for execution on the device"),
            GpuUnusable,
            "torch.cuda.get_arch_list()",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, Exception) else "",
)
def test_each_error_is_named_with_what_to_do(
    error: Exception, ours: type[GrpoError], advice: str
) -> None:
    found = gpu_error(error, "use LESS", "GOES ON")
    assert type(found) is ours
    text = str(found)
    assert text.startswith(f"{type(error).__name__}: {str(error)[:20]}")
    assert advice in text.partition("To do: ")[2]
    assert "expandable" not in text
    assert "\n" not in text


def test_the_allocator_of_a_cpu_is_recognised_and_other_errors_are_not() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert type(gpu_error(raised.value)) is OutOfMemory
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2) @ torch.ones(3)
    assert gpu_error(raised.value) is None


@pytest.mark.parametrize(
    ("visible", "named"),
    [(None, "1"), ("4,GPU-a7", "GPU-a7"), ("MIG-2, MIG-GPU-5/1/0", "MIG-GPU-5/1/0")],
)
def test_a_gpu_is_counted_among_the_visible_ones(visible: str | None, named: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpu(1, "--device cuda:1", environment) == named
    if visible is not None:
        with pytest.raises(NoSuchDevice, match=f"--device cuda:2: .*={visible} lists 2 GPUs"):
            visible_gpu(2, "--device cuda:2", environment)


def test_no_gpu_is_visible_if_the_list_is_empty() -> None:
    with pytest.raises(NoSuchDevice, match="lists 0 GPUs"):
        visible_gpu(0, "--device cuda:0", {"CUDA_VISIBLE_DEVICES": ""})
