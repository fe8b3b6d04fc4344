"""The device that is trained on."""

from __future__ import annotations

import torch

from grpo_trainer.config.trainer import AUTO_DEVICE
from grpo_trainer.errors import NoSuchDevice, PolicyMismatch

HOST = torch.device("cpu")


def device_to_load_on(wanted: str) -> torch.device:
    """Where the trainer has weights of its own. "auto": a GPU where there is one. It becomes CUDA's
    current one.

    Raises:
        NoSuchDevice: this process sees no such GPU, or its torch has no CUDA.
    """
    if wanted == AUTO_DEVICE:
        return _current(torch.device("cuda", 0) if torch.cuda.is_available() else HOST)
    device = torch.device(wanted)
    if device.type != "cuda":
        return device
    index, count = device.index or 0, torch.cuda.device_count()
    if not torch.cuda.is_available():
        raise NoSuchDevice(
            f"--device {wanted}: torch {torch.__version__} finds no GPU; "
            + (
                "this build of torch has no CUDA"
                if torch.version.cuda is None
                else "is the driver loaded, and CUDA_VISIBLE_DEVICES right?"
            )
        )
    if index >= count:
        raise NoSuchDevice(f"--device {wanted}: this process sees {count} GPUs, counted from 0")
    return _current(torch.device("cuda", index))


def require_device(wanted: str, shared: torch.device) -> None:
    """Where the weights are the server's, so is the device. It becomes CUDA's current one.

    Raises:
        PolicyMismatch: another one was asked for.
    """
    device = shared if wanted == AUTO_DEVICE else torch.device(wanted)
    if device.type != shared.type or device.index not in (None, shared.index):
        raise PolicyMismatch(
            f"--device {wanted}, but the served weights are on {shared}; leave --device out, or "
            "start the server there"
        )
    _current(shared)


def _current(device: torch.device) -> torch.device:
    """Kernels of Triton and libraries, and memory of no named device, else go to the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
