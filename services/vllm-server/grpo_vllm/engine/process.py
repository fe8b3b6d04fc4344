"""Entry point of the engine process, which the fork server forks.

If forking is not possible, the fork server runs `python -m grpo_vllm.engine.process PLAN OPTION...`
"""

from __future__ import annotations

import os
import sys
from multiprocessing import resource_tracker

from grpo_core.cpu import prepare_cpu
from grpo_core.errors import GrpoError
from grpo_core.logs import EXIT_FAILED, configure_logging, ending_on
from grpo_core.settings import load_settings
from grpo_core.tree.server import SHARE_WEIGHTS_VARIABLE, ServerSettings, worker_count
from grpo_vllm.engine.plugin import tie_children_to_this_process
from grpo_vllm.engine.vllm_compat import SERVER_VARIABLE
from grpo_vllm.engine.vllm_compat.failures import log_failure
from grpo_vllm.engine_protocol import EnginePlan


def preload(options: list[str]) -> str | None:
    """Import vLLM and everything that serving needs. Returns the reason why this process cannot be
    forked, None if it can."""
    settings = load_settings(ServerSettings, options)
    configure_logging("vllm-server", settings.log_level)
    # NumPy's OpenBLAS would start threads on import, and a process with threads cannot be forked.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    prepare_cpu()
    # vLLM's processes inherit this; our plugin reads it there.
    os.environ[SHARE_WEIGHTS_VARIABLE] = "1" if settings.share_weights else "0"
    os.environ[SERVER_VARIABLE] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # By default vLLM binds each worker on a CPU to a NUMA node of its own, and without enough nodes
    # it does not start.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # vLLM's development routes let anyone pause the engine and call its workers without a token.
    # Its routes for adapters accept any path.
    os.environ["VLLM_SERVER_DEV_MODE"] = "0"
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"

    from grpo_vllm.engine import main  # noqa: F401
    from grpo_vllm.engine.vllm_compat import launch

    return launch.preload()


def run_engine(plan: EnginePlan, options: list[str]) -> None:
    """Serve until stopped. An error of ours ends the process with status 1."""
    settings = load_settings(ServerSettings, options)
    os.environ.pop("VLLM_API_KEY_FILE", None)  # of which vLLM would warn
    tie_children_to_this_process(plan.descriptors())
    if worker_count(settings.engine_arguments) > 1:
        # Python's process that removes shared memory of ended processes: vLLM's would start one of
        # their own, which vLLM kills together with them.
        resource_tracker.ensure_running()

    from grpo_vllm.engine import main
    from grpo_vllm.engine.vllm_compat.layers import current_platform

    try:
        with ending_on(GrpoError):
            main.run(settings, plan)
        if current_platform.is_cpu():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # finalising an interpreter that has imported vLLM takes half a second
    except RuntimeError as error:  # of vLLM, for example if it finds no GPU
        if not log_failure(error):
            raise
        raise SystemExit(EXIT_FAILED) from None


def main() -> None:
    plan, options = EnginePlan.model_validate_json(sys.argv[1]), sys.argv[2:]
    preload(options)
    run_engine(plan, options)


if __name__ == "__main__":
    main()
