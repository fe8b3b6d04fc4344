"""What a hostile program cannot do in a container of its own, and the sandbox inside the container
of the environment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from grpo_env.sandbox import Ended, Sandbox, sandbox_of
from tests.containers.stack import TEST_WITHIN_S, docker
from tests.support.hostile import ATTACKS, Attack

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture(scope="module")
def sandbox(base_image: str) -> Sandbox:
    return sandbox_of(f"docker:{base_image}")


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_achieves_nothing(attack: Attack, sandbox: Sandbox, tmp_path: Path) -> None:
    def run_python(code: str, **options: Any) -> Ended:
        return asyncio.run(sandbox.run([sandbox.python, "-c", code], **options))

    attack(run_python, tmp_path)
    assert docker("ps", "--all", "--quiet", "--filter", "name=sandbox-") == ""
