"""Images, built once, and stacks that leave nothing behind.

Run through `make test-containers`, which starts an engine where none is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.site_inputs import BASE_IMAGE, build_settings
from tests.containers.stack import ROOT, docker

BUILD_WITHIN_S = 2400
TAG = "test"


@pytest.fixture(scope="session")
def base_image() -> str:
    if not docker("images", "--quiet", BASE_IMAGE):
        script = Path(__file__).parent / "make_base.sh"
        subprocess.run(["bash", str(script), BASE_IMAGE], check=True)
    return BASE_IMAGE


@pytest.fixture(scope="session")
def stack_settings(
    base_image: str,  # noqa: ARG001
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, str]]:
    """Variables that every stack of these tests is started with. The images are built."""
    with build_settings(tmp_path_factory.mktemp("site")) as site:
        settings = {**site, "STACK_TAG": TAG, "STACK_DEVICE": "cpu", "CPU_THREADS": "1"}
        done = subprocess.run(
            ["docker", "compose", "--profile", "shared_vllm", "--profile", "single", "build"],
            cwd=ROOT,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=BUILD_WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        yield settings


@pytest.fixture(scope="session")
def own_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a directory of the user's, which containers may read: the stack of
    test_shared_vllm.py alone takes the time to make one."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_model, directory, copy_function=shutil.copyfile)
    directory.chmod(0o755)
    return directory
