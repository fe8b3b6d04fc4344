"""The fork server's process: imports vLLM once and forks an engine whenever one is needed.

Most of an engine's start is importing torch and vLLM; a fork has them already. The supervisor runs
`python -m grpo_vllm.forkserver FD MODULE OPTION...`. MODULE has `preload` and `run_engine`,
as `grpo_vllm.engine.process` does. One engine runs at a time.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys

import structlog

from grpo_core.process import killed_with_parent
from grpo_vllm.engine_protocol import EnginePlan, receive_plan, send_fact

log = structlog.get_logger()

_IGNORED = (signal.SIGINT, signal.SIGTERM)
"""The fork server ignores these signals. It ends when the supervisor closes the socket or ends."""


def main() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    descriptor, name, *options = sys.argv[1:]
    supervisor = socket.socket(fileno=int(descriptor))
    os.set_inheritable(supervisor.fileno(), False)
    module = importlib.import_module(name)
    obstacle = module.preload(options)
    gc.freeze()  # collecting would write to every page, and forks do not share written pages
    plan = _fork_engines(supervisor)
    if plan is None:
        os._exit(0)  # nothing needs to be cleaned up
    if obstacle is None:
        module.run_engine(plan, options)
        return
    log.warning("engine.not_forked", reason=obstacle, effect="the engine starts more slowly")
    # Descriptors that were received over a socket are inheritable.
    os.execv(sys.executable, [sys.executable, "-m", name, plan.model_dump_json(), *options])


def _fork_engines(supervisor: socket.socket) -> EnginePlan | None:
    """Returns the plan in each forked engine, and None in the fork server when it must end."""
    server = os.getpid()
    while True:
        plan = receive_plan(supervisor)
        if plan is None:
            return None
        pid = os.fork()
        if pid == 0:
            supervisor.close()
            # An engine that outlives its supervisor would keep the port that the next engine needs.
            killed_with_parent()
            if os.getppid() != server:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return plan
        for descriptor in plan.descriptors():
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        send_fact(supervisor, pid, pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        send_fact(supervisor, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
