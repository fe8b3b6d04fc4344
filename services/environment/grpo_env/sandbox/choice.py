"""Which sandbox runs the code of models: `--sandbox` of `env-server`, for all its processes."""

from __future__ import annotations

import os
from functools import cache

from grpo_env.sandbox.bubblewrap import usable_bubblewrap
from grpo_env.sandbox.docker import DEFAULT_IMAGE, Docker, require_docker
from grpo_env.sandbox.host import OnHost
from grpo_env.sandbox.interface import Sandbox

VARIABLE = "GRPO_SANDBOX"
"""The chosen kind. Rewards and tools run in processes that inherit it."""
AUTO = "auto"


@cache
def sandbox_of(kind: str) -> Sandbox:
    """The sandbox of a kind: `auto`, `bubblewrap`, `docker`, `docker:IMAGE` or `none`.

    `auto` is bubblewrap.

    Raises:
        SandboxUnusable: it does not work here. The message says what to install or to allow.
        ValueError: there is no such kind.
    """
    name, _, image = kind.partition(":")
    if name == "docker":
        require_docker(image or DEFAULT_IMAGE)
        return Docker(image or DEFAULT_IMAGE)
    if kind == "none":
        return OnHost()
    if kind in (AUTO, "bubblewrap"):
        return usable_bubblewrap()
    raise ValueError(f"--sandbox {kind}: expected auto, bubblewrap, docker, docker:IMAGE or none")


def use_sandbox(kind: str) -> None:
    """Choose the sandbox of this process and of those that it starts. It is first tried when code
    runs."""
    os.environ[VARIABLE] = kind


def chosen_sandbox() -> Sandbox:
    """The sandbox that `--sandbox` chose. Raises as `sandbox_of`."""
    return sandbox_of(os.environ.get(VARIABLE, AUTO))
