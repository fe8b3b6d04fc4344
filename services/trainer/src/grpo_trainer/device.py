"""The device that is trained on."""

from __future__ import annotations

import torch

from grpo_trainer.errors import NoSuchDevice, PolicyMismatch
from grpo_trainer.settings import AUTO_DEVICE


def device_to_load_on(wanted: str) -> torch.device:
    """Where the trainer has weights of its own. "auto": a GPU where there is one.

    Raises:
        NoSuchDevice: this process sees no such GPU, or its torch has no CUDA.
    """
    if wanted == AUTO_DEVICE:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
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
    return torch.device("cuda", index)


def require_device(wanted: str, shared: torch.device) -> None:
    """Where the weights are the server's, so is the device.

    Raises:
        PolicyMismatch: another one was asked for.
    """
    if wanted == AUTO_DEVICE:
        return
    device = torch.device(wanted)
    if device.type != shared.type or device.index not in (None, shared.index):
        raise PolicyMismatch(
            f"--device {wanted}, but the served weights are on {shared}; leave --device out, or "
            "start the server there"
        )
