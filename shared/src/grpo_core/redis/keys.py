"""Every Redis key carries its run's prefix, so that runs share one Redis without meeting."""

from __future__ import annotations

DEFAULT_RUN_ID = "default"


def run_prefix(run_id: str) -> str:
    """Braces make the whole run one hash slot, which multi-key scripts need on a cluster."""
    return f"grpo:{{{run_id}}}:"


def served_weights_key(run_id: str) -> str:
    """A hash in which vllm-server writes, before anybody is answered under it, which weights it
    serves: `epoch` and `step` are their version. run-api reads these two with every group."""
    return run_prefix(run_id) + "served-weights"
