"""What a hostile program cannot do in a container of its own, nor in bubblewrap inside the
environment's container, where it runs as an ordinary user."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_env.sandbox import Ended, Sandbox, SandboxFailed, sandbox_of
from grpo_env.sandbox.container import LABEL, Resources, container
from tests.containers.conftest import TAG
from tests.containers.stack import ROOT, TEST_WITHIN_S, Done, docker, run
from tests.support.hostile import ATTACKS, Attack
from tests.support.planted import leaks, planted, watched_command_lines

IMAGE = f"grpo-environment:{TAG}"
HARDENED = (
    *("--user", "1000:1000", "--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp:mode=1777"),
    *("--security-opt", "no-new-privileges:true"),
)
"""As every service of the stack."""
ATTACK_ALL = """
import asyncio, pathlib, tempfile
from grpo_env.sandbox import chosen_sandbox
from tests.support.hostile import ATTACKS
sandbox = chosen_sandbox()
print("proc:", sandbox.has_proc)
for attack in ATTACKS:
    def run(code, **options):
        return asyncio.run(sandbox.run([sandbox.python, "-c", code], **options))
    attack(run, pathlib.Path(tempfile.mkdtemp()))
    print("survived", attack.__name__)
"""

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture(scope="module")
def sandbox(base_image: str) -> Sandbox:
    return sandbox_of(f"docker:{base_image}")


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_on_docker_achieves_nothing(
    attack: Attack, sandbox: Sandbox, tmp_path: Path
) -> None:
    def run_python(code: str, **options: Any) -> Ended:
        return asyncio.run(sandbox.run([sandbox.python, "-c", code], **options))

    before = containers("--all")
    attack(run_python, tmp_path)
    assert containers("--all") <= before


def containers(*options: str) -> set[str]:
    return {*docker("ps", *options, "--quiet", "--filter", f"label={LABEL}").split()}


async def test_no_command_line_shows_a_variable_of_the_program(
    sandbox: Sandbox, base_image: str
) -> None:
    given = planted("API_KEY", "PATH_KEY") | {"LINES": "two\nlines"}
    steering = {"DOCKER_HOST": "unix:///nowhere", "LD_PRELOAD": "", "HOME": "/nowhere"}
    with watched_command_lines() as seen:
        ended = await sandbox.run(["sh", "-c", "env; sleep 0.3"], environment=given | steering)
        async with container(base_image, Resources(environment=given | steering)) as opened:
            inside = await opened.run("env", 30.0, environment=planted("EXEC_KEY") | steering)
    for name, value in (given | steering).items():
        assert f"{name}={value}" in ended.output
        assert f"{name}={value}" in inside.output
    (value,) = planted("EXEC_KEY").values()
    assert value in inside.output
    assert any(b"API_KEY" in line for _, line in seen())
    assert leaks(seen(), planted("API_KEY", "PATH_KEY", "EXEC_KEY")) == []


async def test_a_run_that_is_cancelled_leaves_no_container(sandbox: Sandbox) -> None:
    before = containers("--all")
    for milliseconds in range(0, 200, 20):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(sandbox.run(["sleep", "1000"]), milliseconds / 1000)
    assert containers("--all") == before


def test_a_container_ends_when_the_process_that_runs_it_was_killed(base_image: str) -> None:
    before = containers()
    code = f"""
import asyncio
from grpo_env.sandbox import Limits, docker
docker._START_S = -990  # so it ends after 10 s
asyncio.run(docker.Docker({base_image!r}).run(["sleep", "1000"], limits=Limits(seconds=1000)))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as running:
        while not (left := containers() - before):  # that run: `wait` passes one not started
            assert running.poll() is None
        running.kill()
    assert docker("wait", *left).strip() == "137"
    docker("rm", *left)


async def test_a_container_that_does_not_start_is_no_end_of_the_program(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed, match=r"docker start failed: .*inside /proc"):
        await sandbox.run(["true"], readable=[Path("/proc/version")])
    assert (await sandbox.run(["no-such-program"])).status == 127


def namespaces(setting: str) -> list[str]:
    """Options of `docker run` for ENVIRONMENT_NAMESPACES."""
    file = ROOT / "containers" / f"namespaces.{setting}.yml"
    chosen = yaml.safe_load(file.read_text())["services"]["environment"]["security_opt"]
    return [word for value in chosen for word in ("--security-opt", value)]


def in_environment(*options: str) -> Done:
    support = ROOT / "tests" / "support"
    mounts = ["--volume", f"{support}:/attacks/tests/support:ro", "--workdir", "/attacks"]
    command = ["docker", "run", "--rm", *HARDENED, *options, *mounts, "--entrypoint", "python"]
    return run([*command, IMAGE, "-c", ATTACK_ALL])


@pytest.mark.usefixtures("stack_settings")
@pytest.mark.parametrize("setting", ["on", "seccomp"])
def test_bubblewrap_protects_the_environment_in_its_container(setting: str) -> None:
    options = namespaces("on") if setting == "on" else ["--security-opt", "seccomp=unconfined"]
    done = in_environment(*options)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *survived = done.stdout.splitlines()
    assert first == f"proc: {setting == 'on'}"
    assert len(survived) == len(ATTACKS)


@pytest.mark.usefixtures("stack_settings")
def test_without_namespaces_the_error_names_the_cause() -> None:
    done = in_environment(*namespaces("off"))
    assert "SandboxUnusable: bwrap cannot make namespaces here: bwrap: No permissions" in (
        done.stderr
    )
    assert "ENVIRONMENT_NAMESPACES=on" in done.stderr
