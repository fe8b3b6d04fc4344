"""Images, built once, and stacks that leave nothing behind.

Run through `make test-containers`, which starts an engine where none is there. A machine may reach
Debian and PyPI through mirrors, with a certificate of its own and wheels on disk. pip is told all
that by its configuration, and the same goes into the builds, as a secret.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.containers.stack import ROOT, docker

BASE_IMAGE = "grpo-test-base:bookworm-fixed"
CA_IN_BUILD = "/run/secrets/ca_bundle"


@contextmanager
def build_settings(directory: Path) -> Iterator[dict[str, str]]:
    """Variables for `docker compose build`, good as long as the context is open."""
    settings = {"BASE_IMAGE": BASE_IMAGE, "BUILD_NETWORK": "host"}
    configuration = pip_configuration()
    lines = ["[global]"]
    certificates = configuration.get("cert")
    if certificates:
        settings["CA_BUNDLE_FILE"] = certificates
        lines.append(f"cert = {CA_IN_BUILD}")
    for name in ("index-url", "extra-index-url"):
        remote = [url for url in configuration.get(name, "").split() if urlsplit(url).netloc]
        if remote:
            lines.append(f"{name} = {' '.join(remote)}")
    wheels = [Path(path) for path in configuration.get("find-links", "").split()]
    with served([path for path in wheels if path.is_dir()]) as urls:
        if urls:
            lines += [f"find-links = {' '.join(urls)}", "trusted-host = 127.0.0.1"]
        if any(path.glob("torch-*cpu*.whl") for path in wheels):
            settings["TORCH_INDEX_URL"] = ""
        file = directory / "pip.conf"
        file.write_text("\n".join([*lines, ""]))
        settings["PIP_CONF_FILE"] = str(file)
        yield settings


def pip_configuration() -> dict[str, str]:
    """`index-url`, `find-links`, `cert` and so on, as pip sees them; variables win over files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = value.strip("'")
    return found


@contextmanager
def served(directories: list[Path]) -> Iterator[list[str]]:
    """Each directory at a URL of this machine: a build sees no other file system than its own."""
    servers = [
        ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(_Quiet, directory=os.fspath(directory))
        )
        for directory in directories
    ]
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield [f"http://127.0.0.1:{server.server_port}/" for server in servers]
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


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
        profiles = [f"--profile={name}" for name in ("shared_vllm", "single", "monitoring")]
        done = subprocess.run(
            ["docker", "compose", *profiles, "build"],
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
