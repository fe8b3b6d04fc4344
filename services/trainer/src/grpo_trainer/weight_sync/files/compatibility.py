"""What a server must be for a mode that hands weights to it, as far as it says."""

from __future__ import annotations

import torch

from grpo_core.clients.inference import BridgeInfo
from grpo_core.weights.ref import WeightKind
from grpo_trainer.errors import PolicyMismatch


def require_server(url: str, info: BridgeInfo, kind: WeightKind) -> None:
    """Raises `PolicyMismatch` where it cannot serve what is trained; lists every reason."""
    problems = []
    if kind is WeightKind.ADAPTER and not info.lora_enabled:
        problems.append(
            "it takes no adapters: start vllm-api-server with --enable-lora --max-lora-rank R"
        )
    if kind is WeightKind.CHECKPOINT and info.lora_enabled:
        problems.append("it takes adapters, not checkpoints: start it without --enable-lora")
    if info.weights_socket is not None:
        problems.append("it shares its weights: start it without --share-weights")
    if problems:
        raise PolicyMismatch(
            f"the server at {url} is not one of this mode:\n  " + "\n  ".join(problems)
        )


def dtype_to_load(wanted: str, info: BridgeInfo) -> torch.dtype:
    """Args: wanted: --dtype.

    Raises:
        PolicyMismatch: the server holds another one, or does not say which.
    """
    if info.dtype is None:
        raise PolicyMismatch(
            "the server does not say its data type at /bridge/info; it is too old for this mode"
        )
    if wanted not in ("auto", info.dtype):
        raise PolicyMismatch(
            f"--dtype {wanted}, but the server holds {info.dtype}; start both with the same, or "
            "the trainer with --dtype auto"
        )
    dtype: torch.dtype = getattr(torch, info.dtype)
    return dtype
