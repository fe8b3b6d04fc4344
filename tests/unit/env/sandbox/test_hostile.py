"""What a hostile program cannot do in bubblewrap. tests/containers/test_sandbox.py tries the same
in Docker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_env.sandbox import Ended, Limits, SandboxFailed
from grpo_env.sandbox.namespace import Namespace
from tests.support.hostile import ATTACKS, Attack, busy, leaving_nothing

_ATTACKS = [
    pytest.param(attack, marks=[pytest.mark.full] if attack is busy else []) for attack in ATTACKS
]
"""One takes a second of CPU time."""


@pytest.mark.parametrize("attack", _ATTACKS)
def test_an_attack_achieves_nothing(
    attack: Attack, python: Callable[..., Ended], tmp_path: Path
) -> None:
    attack(python, tmp_path)


def test_only_sockets_of_the_network_open(python: Callable[..., Ended]) -> None:
    """AF_VSOCK, for one, leads to the host of a virtual machine."""
    code = """
import errno, socket
for family in range(1, 46):
    try:
        socket.socket(family, socket.SOCK_DGRAM).close()
    except OSError as error:
        assert error.errno == errno.EAFNOSUPPORT, (family, error)
    else:
        print(family, end=" ")
"""
    ended = python(code)
    assert ended.ok, ended
    allowed = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
    assert {*map(int, ended.output.split())} <= allowed


def test_a_program_that_is_ended_while_it_starts_leaves_nothing(
    python: Callable[..., Ended],
) -> None:
    def run(code: str, **options: Any) -> Ended:
        try:
            return python(code, **options)
        except SandboxFailed:  # it has not begun
            return Ended(137, "", "", "timeout", 0.0)

    for milliseconds in range(0, 12, 2):
        limits = Limits(seconds=milliseconds / 1000)
        leaving_nothing(run, "import time; time.sleep(10_000)", limits=limits)


def test_what_bwrap_told_in_part_is_no_error() -> None:
    async def ended_while_it_tells() -> int:
        bwrap = await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True)
        with Namespace(Limits()) as namespace:
            os.write(namespace.inherited[0], b'{ "child-pid": 2551, "ipc-name')
            await namespace.kill(bwrap.pid)
        return await bwrap.wait()

    assert asyncio.run(ended_while_it_tells()) == -signal.SIGKILL
