"""The plugin that vLLM loads into each of its processes, and the names it shares with the server.

Processes that vLLM starts end with the engine process. vLLM ends them itself when that process ends
in order; one that is killed would leave them behind with all of the engine's memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import threading
from collections.abc import Mapping, Sequence

SHARE_WEIGHTS_VARIABLE = "VLLM_ENABLE_SHARED_WEIGHTS"
LOAD_FORMAT = "grpo_shared"
WORKER_EXTENSION = "grpo_vllm.engine.worker_extension.WeightExport"
VARIABLE = "GRPO_VLLM_ENGINE_PROCESS"
"""Process id of the engine process, for those that it starts."""


def register() -> None:
    """Register the shared load format where the server asked for it, and tie this process to the
    engine process. Touches nothing else."""
    end_with_the_engine_process()
    if os.environ.get(SHARE_WEIGHTS_VARIABLE) == "1":
        import grpo_vllm.weights.loader  # noqa: F401  (importing registers the load format)


def tie_children_to_this_process(descriptors: Sequence[int]) -> None:
    """Called by the engine process: whatever it starts from now on ends with it.

    Args:
        descriptors: of its own, which processes that it forks are not to hold open: a connection
            ends for its client when the last of them has closed it.
    """
    os.environ[VARIABLE] = str(os.getpid())
    own = {number: os.fstat(number).st_ino for number in descriptors}
    # Forked processes do not load the plugin again, spawned ones do.
    os.register_at_fork(after_in_child=functools.partial(_begin_as_fork, own))


def _begin_as_fork(not_ours: Mapping[int, int]) -> None:
    for number, inode in not_ours.items():
        with contextlib.suppress(OSError):
            if os.fstat(number).st_ino == inode:  # else the number has passed to another file
                os.close(number)
    end_with_the_engine_process()


def end_with_the_engine_process() -> None:
    """Have the kernel tell this process when the engine process is gone, and end it then."""
    pid = int(os.environ.get(VARIABLE, 0))
    if not pid or pid == os.getpid():
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_wait_for, args=(descriptor,), daemon=True).start()


def _wait_for(descriptor: int) -> None:
    gone = select.poll()
    gone.register(descriptor, select.POLLIN)
    gone.poll()
    os.kill(os.getpid(), signal.SIGKILL)
