"""Imports vLLM once per test session, and forks the fork servers of test servers from it.

A vllm-server needs eleven seconds to start; ten of them are imports of its fork server. Here one
process per test session does these imports. Everything else of a server is the product's code. The
supervisor runs in its own process. To start its fork server it runs `fork_server_client`, which
requests a fork from this process and ends when the fork ends.

`python -m tests.support.preloaded fork SOCKET` runs the process that forks, `python -m
tests.support.preloaded serve OPTION...` a server (`python -m grpo_vllm OPTION...`), and `python -m
tests.support.preloaded pytest ARGUMENT...` a process that forks both servers and pytest: tests that
look at vLLM themselves do not import it again.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from grpo_core.process import killed_with_parent
from grpo_vllm.engine.vllm_compat import SERVER_VARIABLE

VARIABLE = "GRPO_TEST_FORK_SOCKET"
MODULE = "tests.support.preloaded"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_CLIENT = Path(__file__).with_name("fork_server_client")
_REQUEST_BYTES = 1024 * 1024


@functools.cache
def fork_socket() -> str:
    """Socket of the session's process. Where pytest is no fork of it, the first call starts the
    process, which ends at exit."""
    if VARIABLE in os.environ:
        return os.environ[VARIABLE]
    from grpo_core.process import ManagedProcess
    from tests.support.wait import wait_for

    # Unix socket paths are limited to 107 bytes, and pytest's directories may be longer.
    directory = tempfile.TemporaryDirectory(prefix="grpo-")
    path = Path(directory.name) / "fork.sock"
    command = [sys.executable, "-m", MODULE, "fork", str(path)]
    process = ManagedProcess("preloaded", command, Path(directory.name) / "log", ENVIRONMENT)
    atexit.register(directory.cleanup)
    atexit.register(process.kill)
    # The process listens from the start; requests wait until all imports are done.
    wait_for(lambda: path.exists() or process.exit_code is not None)
    assert process.exit_code is None, process.log_tail()
    return str(path)


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "fork":
        sys.exit(_fork_on_request(_preloaded(arguments[0])))
    elif role == "pytest":
        sys.exit(_run_pytest(arguments))
    from grpo_vllm.__main__ import main as serve

    # `env python3` finds this interpreter, and not a shim.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    sys.executable = str(_CLIENT)  # the supervisor starts its fork server with this command
    serve(arguments)


def _run_pytest(arguments: list[str]) -> int:
    """Serve forks until pytest ends. Returns its exit status."""
    environment = os.environ | ENVIRONMENT  # vLLM's import adds variables
    os.environ.update(ENVIRONMENT)
    directory = tempfile.mkdtemp(prefix="grpo-")
    path = str(Path(directory) / "fork.sock")
    listener = _preloaded(path)
    pid = os.fork()
    if pid == 0:
        killed_with_parent()
        listener.close()
        os.environ.clear()
        os.environ.update(environment | {VARIABLE: path})
        # Of plugins that vLLM imports too
        sys.argv = ["pytest", "-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]
        import pytest

        return pytest.main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to pytest, too
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    status = _fork_on_request(listener, pid)
    shutil.rmtree(directory)
    return status


def _preloaded(path: str) -> socket.socket:
    """The listening socket, once all imports are done."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(16)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ[SERVER_VARIABLE] = "1"  # vLLM chooses its platform when it is imported

    from grpo_vllm.engine import main  # noqa: F401
    from grpo_vllm.engine.vllm_compat import launch

    obstacle = launch.preload()
    assert obstacle is None, obstacle
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    valid_vec_isa_list()  # remembered: each engine would run three processes to find it
    from vllm.model_executor.models import registry

    # On a machine without vLLM's cache of models, each looks at its class in a process of its own.
    registry._run_in_subprocess = lambda look: look()
    return listener


def _fork_on_request(listener: socket.socket, tests: int | None = None) -> int:
    """Until the process `tests` ends, if one is given. Returns its exit status."""
    watched = selectors.DefaultSelector()
    watched.register(listener, selectors.EVENT_READ)
    if tests is not None:
        watched.register(os.pidfd_open(tests), selectors.EVENT_READ)
    while True:
        # A fork and its client may both end within one batch of events.
        ended: set[int] = set()
        for key, _ in watched.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                message, descriptors, _, _ = socket.recv_fds(client, _REQUEST_BYTES, 8)
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    client.close()
                    watched.close()
                    _become_host(json.loads(message), descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                pidfd = os.pidfd_open(pid)
                watched.register(client, selectors.EVENT_READ, (client, pid, pidfd))
                watched.register(pidfd, selectors.EVENT_READ, (client, pid, pidfd))
            elif key.data is None:
                assert tests is not None
                _, status = os.waitpid(tests, 0)
                return os.waitstatus_to_exitcode(status)
            elif key.data[1] not in ended:
                ended.add(key.data[1])
                _end(watched, *key.data)


def _end(watched: selectors.DefaultSelector, client: socket.socket, pid: int, pidfd: int) -> None:
    """The fork has ended, or its client has ended and the fork must end too."""
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # no effect on a process that has ended
    _, status = os.waitpid(pid, 0)
    for fileobj in (client, pidfd):
        watched.unregister(fileobj)
    os.close(pidfd)
    with contextlib.suppress(BrokenPipeError):
        client.send(str(os.waitstatus_to_exitcode(status)).encode())
    client.close()


def _become_host(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    from grpo_vllm import forkserver

    killed_with_parent()
    output, errors, supervisor = descriptors
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[1:1] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = ["fork_server", str(supervisor), *request["arguments"]]
    forkserver.main()
    sys.exit()


if __name__ == "__main__":
    main()
