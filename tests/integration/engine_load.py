"""How busy the engine is, by vLLM's own gauges."""

from __future__ import annotations

import httpx

from tests.fixtures.inference import InferenceServer

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting{")


def running_requests(server: InferenceServer) -> float:
    """Sequences running and waiting."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(GAUGES))
