"""System calls that programs in `bubblewrap` do not have: a filter for seccomp(2).

They would reserve memory that no limit counts (anonymous files, System V shared memory), or make
namespaces, in which a program may mount file systems in memory of any size. Sockets of most
families, such as those of virtual machines, reach beyond the namespace of the network. Others are
for the kernel's experts, and programs work without them.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from collections.abc import Mapping
from functools import cache

from grpo_env.sandbox.interface import SandboxUnusable

_ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of linux/audit.h."""
_CLONE: Mapping[str, int] = {"x86_64": 56, "aarch64": 220}
_HIDDEN: Mapping[str, tuple[int, int]] = {  # numbers on x86_64 and aarch64
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "unshare": (272, 97),
    "clone3": (435, 435),  # C libraries then use clone, whose flags the filter can read
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
_SOCKET: Mapping[str, int] = {"x86_64": 41, "aarch64": 198}
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_CLONE_NEWUSER = 0x10000000
_X32_CALLS = 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`."""
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


@cache
def seccomp_filter() -> bytes:
    """The program of the filter, as an array of `struct sock_filter`. Raises `SandboxUnusable`: the
    numbers of this processor's system calls are not known."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise SandboxUnusable(
            f"bubblewrap: no filter for the processor {machine}; choose `--sandbox docker`"
        )
    column = [*_ARCHITECTURES].index(machine)
    hidden = [numbers[column] for numbers in _HIDDEN.values()]
    of_socket = [
        _step(_IF_EQUAL, _SOCKET[machine], 0, len(_FAMILIES) + 2),
        _step(_LOAD, _FIRST_ARGUMENT),
        *(_step(_IF_EQUAL, one, len(_FAMILIES) - i + 3) for i, one in enumerate(_FAMILIES)),
        _step(_RETURN, _ERROR | errno.EAFNOSUPPORT),
    ]
    rest = len(hidden) + len(of_socket)
    return b"".join(
        [
            _step(_LOAD, _ARCHITECTURE),
            _step(_IF_EQUAL, _ARCHITECTURES[machine], 1, 0),
            _step(_RETURN, _KILL),  # a program for another processor
            _step(_LOAD, _NUMBER),
            _step(_IF_AT_LEAST, _X32_CALLS, rest + 4, 0),
            *(_step(_IF_EQUAL, call, rest - i + 3, 0) for i, call in enumerate(hidden)),
            *of_socket,
            _step(_IF_EQUAL, _CLONE[machine], 0, 1),
            _step(_LOAD, _FIRST_ARGUMENT),
            # Without the load, this is the number of a call, which has no such bit.
            _step(_IF_ANY_BIT, _CLONE_NEWUSER, 1, 0),
            _step(_RETURN, _ALLOW),
            _step(_RETURN, _ERROR | errno.ENOSYS),
        ]
    )


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Both jumps count the steps to leave out."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
