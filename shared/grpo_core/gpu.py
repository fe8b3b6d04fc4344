"""GPUs: the one that a number names, and errors of CUDA, torch and vLLM with what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from grpo_core.errors import GrpoError

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class NoSuchDevice(GrpoError):
    """A program cannot use the GPU that an option names."""


class OutOfMemory(GrpoError):
    """The GPU or the host has too little free memory. The message names options that need less."""


class GpuUnusable(GrpoError):
    """No work can start on the GPU, because of its driver, its settings or the build of torch."""


class GpuFailed(GrpoError):
    """The GPU, or a program on it, failed while it computed."""


_HARDWARE = "look for the GPU in nvidia-smi, and for Xid in dmesg"

FAULTS: Mapping[type[GrpoError], Mapping[str, str]] = {
    OutOfMemory: {
        "less than desired [CG]PU mem|less than the engine's budget|less than requested mem": (
            "end other processes (nvidia-smi shows a GPU's), or lower --gpu-memory-utilization"
        ),
        "No available memory for the cache": "raise --gpu-memory-utilization",
        "larger than the available KV cache": (
            "lower --max-model-len, or raise --gpu-memory-utilization"
        ),
        "out of memory|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory": "{memory}",
    },
    GpuUnusable: {
        "busy or unavailable": (
            "trainer and server share a GPU in one mode only: nvidia-smi --compute-mode=DEFAULT"
        ),
        r"\bMPS\b": "a shared GPU needs no MPS: end its daemon, and unset CUDA_MPS_PIPE_DIRECTORY",
        "forward compatibility": "update the driver, or remove cuda-compat from LD_LIBRARY_PATH",
        "driver on your system is too old|driver version is insufficient|unsupported display": (
            "update the driver: nvidia-smi shows the newest CUDA that it runs"
        ),
        "no NVIDIA driver|no CUDA-capable device|No CUDA GPUs are|Failed to infer device type": (
            f"check nvidia-smi, {VISIBLE_GPUS}, a container's --gpus; or install for DEVICE=cpu"
        ),
        "Torch not compiled with CUDA": "remove .venv, then run make install DEVICE=cuda",
        "no kernel image": "torch.cuda.get_arch_list() shows the GPUs of this build of torch",
    },
    GpuFailed: {
        "ECC error|GPU is lost|fallen off the bus|NVLink error": (
            f"{_HARDWARE}; reset the GPU or restart the host. {{again}}"
        ),
        "device-side assert|illegal memory access|illegal instruction|misaligned address": (
            "CUDA_LAUNCH_BLOCKING=1 shows which line failed. {again}"
        ),
        "CUDA error|CUDA driver error": f"{_HARDWARE}. {{again}}",
    },
}
"""What to do, by our name of an error and a part of its text. The first that matches counts."""


def gpu_error(error: BaseException, memory: str = "", again: str = "") -> GrpoError | None:
    """An error of torch or vLLM as one of ours; None if it is of another kind.

    Args:
        memory: how this program needs less memory
        again: how its work goes on after a failure
    """
    # torch then explains how to debug a kernel, and its allocator.
    text = str(error).strip().partition("\n")[0].partition(". If reserved")[0]
    for ours, rows in FAULTS.items():
        for pattern, advice in rows.items():
            if re.search(pattern, text):
                to_do = advice.format(memory=memory, again=again)
                return ours(f"{type(error).__name__}: {text.rstrip('.')}. To do: {to_do}")
    return None


def visible_gpu(index: int, option: str, environment: Mapping[str, str] = os.environ) -> str:
    """The GPU with this number among those that this process sees, as CUDA_VISIBLE_DEVICES names
    it: a number, a UUID (GPU-…) or a part of a GPU (MIG-…).

    Args: option: the one that names the GPU, for the message

    Raises:
        NoSuchDevice: CUDA_VISIBLE_DEVICES lists fewer.
    """
    visible = environment.get(VISIBLE_GPUS)
    if visible is None:
        return str(index)
    gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    if index >= len(gpus):
        raise NoSuchDevice(
            f"{option}: {VISIBLE_GPUS}={visible} lists {len(gpus)} GPUs, which {option.split()[0]} "
            f"counts from 0; choose a lower number, or add the GPU to {VISIBLE_GPUS}"
        )
    return gpus[index]
