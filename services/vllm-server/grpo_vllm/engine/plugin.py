"""A vLLM plugin: registers the shared load format and ends vLLM's processes with the engine.

vLLM ends its processes itself when the engine stops normally. If the engine is killed, they would
stay behind and keep its memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import threading
from collections.abc import Mapping, Sequence

from grpo_core.tree.server import SHARE_WEIGHTS_VARIABLE
from grpo_vllm.engine.vllm_compat import SERVER_VARIABLE

VARIABLE = "GRPO_VLLM_ENGINE_PROCESS"
"""Environment variable with the engine's process id, for the processes that it starts."""


def register() -> None:
    """Called by vLLM in each of its processes. Registers what names its failures, small KV blocks
    for a CPU, the backend that loads weights while the engine runs, in our server how it loads its
    tokenizer, and the shared load format only if the server shares weights."""
    end_with_the_engine_process()
    # Not at the top: `engine.process` prepares the environment before vLLM is imported.
    from grpo_vllm.engine.vllm_compat.failures import name_logged_failures
    from grpo_vllm.engine.vllm_compat.launch import (
        offer_small_blocks,
        offer_staged_update,
        use_file_tokenizer,
    )

    name_logged_failures()
    offer_small_blocks()
    offer_staged_update()
    if SERVER_VARIABLE in os.environ:
        use_file_tokenizer()
    if os.environ.get(SHARE_WEIGHTS_VARIABLE) == "1":
        import grpo_vllm.weights.loader  # noqa: F401  (importing registers the load format)


def tie_children_to_this_process(descriptors: Sequence[int]) -> None:
    """Make every process that the engine starts from now on end with the engine.

    Args:
        descriptors: the engine's own sockets. Its forks close them, because a client sees a
            connection end only when every process has closed it.
    """
    os.environ[VARIABLE] = str(os.getpid())
    own = {number: os.fstat(number).st_ino for number in descriptors}
    # Forked processes do not load the plugin again, spawned ones do.
    os.register_at_fork(after_in_child=functools.partial(_begin_as_fork, own))


def _begin_as_fork(not_ours: Mapping[int, int]) -> None:
    for number, inode in not_ours.items():
        with contextlib.suppress(OSError):
            if os.fstat(number).st_ino == inode:  # otherwise another file has this number now
                os.close(number)
    end_with_the_engine_process()


def end_with_the_engine_process() -> None:
    """Kill this process as soon as the engine is gone."""
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
