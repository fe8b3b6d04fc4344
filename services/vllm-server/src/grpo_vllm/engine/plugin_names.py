"""What the server tells vLLM's processes, and the plugin in them understands."""

from __future__ import annotations

SHARE_WEIGHTS_VARIABLE = "VLLM_ENABLE_SHARED_WEIGHTS"
LOAD_FORMAT = "grpo_shared"
WORKER_EXTENSION = "grpo_vllm.engine.worker_extension.WeightExport"
