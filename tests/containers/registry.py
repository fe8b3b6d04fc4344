"""A registry for images on a port of this machine, from Debian's package docker-registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from grpo_local.process.ports import free_port
from tests.support.wait import wait_for

MANIFEST = {"Accept": "application/vnd.docker.distribution.manifest.v2+json"}


class Registry:
    def __init__(self, address: str) -> None:
        self.address = address

    def answers(self) -> bool:
        try:
            return httpx.get(f"http://{self.address}/v2/").is_success
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Any:
        answer = httpx.get(f"http://{self.address}/v2/{path}", headers=MANIFEST)
        return json.loads(answer.raise_for_status().content)

    def labels(self, name: str, tag: str) -> dict[str, str]:
        config = self.get(f"{name}/manifests/{tag}")["config"]["digest"]
        labels: dict[str, str] = self.get(f"{name}/blobs/{config}")["config"]["Labels"]
        return labels


@contextmanager
def running(directory: Path) -> Iterator[Registry]:
    """It has no login. Docker connects to registries on 127.0.0.1 without TLS."""
    registry = Registry(f"127.0.0.1:{free_port()}")
    storage = {"filesystem": {"rootdirectory": str(directory / "images")}}
    config = {"version": 0.1, "storage": storage, "http": {"addr": registry.address}}
    file = directory / "config.yml"
    file.write_text(json.dumps(config))
    with (directory / "log").open("w") as log:
        process = subprocess.Popen([program(), "serve", str(file)], stdout=log, stderr=log)
        try:
            wait_for(registry.answers)
            yield registry
        finally:
            process.terminate()
            process.wait()


def program() -> str:
    """Debian's package is unpacked once, below the cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    found = cache / "grpo" / "docker-registry"
    if not found.exists():
        with tempfile.TemporaryDirectory() as directory:
            for command in (
                "apt-get update -qq",
                "apt-get download -qq -o APT::Sandbox::User=root docker-registry",
                "dpkg-deb --extract docker-registry_*.deb .",
            ):
                subprocess.run(["bash", "-c", command], cwd=directory, check=True)
            found.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(directory) / "usr/bin/docker-registry", found)
    return str(found)
