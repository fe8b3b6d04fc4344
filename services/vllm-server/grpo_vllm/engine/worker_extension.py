"""Methods that vLLM adds to its worker, so that the server can export the worker's weights."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from grpo_vllm.weights.cuda_ipc import exported
from grpo_vllm.weights.loader import SharedParameters, shared_parameters


class WeightExport:
    """`--worker-extension-cls grpo_vllm.engine.worker_extension.WeightExport`"""

    def describe_weights(self) -> dict[str, Any]:
        """The manifest as JSON. On CPU also this process's id and the descriptor of its arena."""
        shared = self._shared_parameters()
        described: dict[str, Any] = {"manifest": shared.manifest.model_dump_json()}
        if shared.memory.fd is not None:
            described |= {"pid": os.getpid(), "fd": shared.memory.fd}
        return described

    def export_weights(self) -> dict[str, str]:
        """Export the GPU memory to one more trainer: `memory` as JSON, or `refused`: the reason."""
        shared = self._shared_parameters().memory
        try:
            memory = exported(shared)
        except RuntimeError as error:  # from torch or CUDA
            return {"refused": f"CUDA cannot export the weights: {error}"}
        return {"memory": memory.model_dump_json()}

    def wait_for_device(self) -> None:
        """Return when all queued work on this worker's GPU is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _shared_parameters(self) -> SharedParameters:
        model: nn.Module = self.get_model()  # type: ignore[attr-defined]
        return shared_parameters(model)
