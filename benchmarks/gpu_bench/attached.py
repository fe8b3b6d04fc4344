"""A trainer attached to the server that shares its weights, in this process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_bench.servers import Server
from grpo_core.clients.inference import BridgeClient
from grpo_trainer.weight_sync.shared_memory.shared_vllm import SharedVllm

LEASE_S = 60.0


@contextlib.contextmanager
def attached(server: Server, model: str) -> Iterator[tuple[SharedVllm, Any]]:
    """The weights' sync, and the policy of views."""
    sync = SharedVllm(bridge=BridgeClient(server.url), model_name=model, lease_s=LEASE_S)
    try:
        yield sync, sync.load_policy().eval()
    finally:
        sync.close()


def give_memory_back() -> None:
    """What nothing refers to any more, to the driver; and what others opened of ours."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
