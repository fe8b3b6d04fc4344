"""Methods that vLLM adds to its worker, called through `collective_rpc`."""

from __future__ import annotations

import os
from typing import Any

from grpo_vllm.loader import shared_parameters


class WeightExport:
    """`--worker-extension-cls grpo_vllm.worker_extension.WeightExport`"""

    def export_weights(self) -> dict[str, Any]:
        """Where the arena is: this process, its descriptor there, and the manifest as JSON."""
        shared = shared_parameters(self.get_model())  # type: ignore[attr-defined]
        return {
            "pid": os.getpid(),
            "fd": shared.arena.fd,
            "manifest": shared.manifest.model_dump_json(),
        }
