"""`vllm-api-server` with the stand-in for its engine and no other difference."""

from __future__ import annotations

import sys

from grpo_core.logs import configure_logging
from grpo_vllm.settings import load_server_settings
from grpo_vllm.supervisor.main import supervise

if __name__ == "__main__":
    settings = load_server_settings(sys.argv[1:])
    configure_logging("vllm-server", settings.log_level)
    raise SystemExit(supervise(settings, sys.argv[1:], "tests.unit.vllm.stub_engine"))
