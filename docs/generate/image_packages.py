"""Packages of container images: a bill of materials by syft, and what Debian has newer."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_NEWER = re.compile(r"^Inst (\S+) \[(\S+)\] \((\S+) ", re.MULTILINE)
_LOOK = """
. /etc/os-release
echo "$PRETTY_NAME"
apt-get update -qq
apt-get --simulate dist-upgrade
"""


@dataclass(frozen=True)
class ImageFixes:
    """debian, python: number of its packages; outdated: those of Debian with a newer version,
    `name old → new`; release: of Debian; syft: with its version."""

    name: str
    debian: int
    python: int
    outdated: list[str]
    release: str
    syft: str


def fixes_of(image: str, output: Path) -> ImageFixes:
    """Write the image's bill of materials, and ask its Debian for fixes as `apt-get upgrade`
    would. Raises `CalledProcessError` if a command fails."""
    bill = output / f"{image.replace('/', '-').replace(':', '-')}.cdx.json"
    _run("syft", "scan", "--quiet", f"docker:{image}", "--output", f"cyclonedx-json={bill}")
    told = json.loads(bill.read_text())
    kinds = Counter(each.get("purl", "").partition("/")[0] for each in told["components"])
    (syft,) = told["metadata"]["tools"]["components"]
    as_root = ("--rm", "--user", "0", "--network", "host", "--entrypoint", "sh")
    said = _run("docker", "run", *as_root, image, "-euc", _LOOK)
    return ImageFixes(
        name=image.partition(":")[0],
        debian=kinds["pkg:deb"],
        python=kinds["pkg:pypi"],
        outdated=newer(said),
        release=said.partition("\n")[0],
        syft=f"{syft['name']} {syft['version']}",
    )


def newer(said: str) -> list[str]:
    """Args: said: what `apt-get --simulate dist-upgrade` prints"""
    return [f"{name} {old} → {new}" for name, old, new in _NEWER.findall(said)]


def _run(*words: str) -> str:
    environment = {**os.environ, "SYFT_CHECK_FOR_APP_UPDATE": "false"}
    return subprocess.run(
        words, stdout=subprocess.PIPE, text=True, check=True, env=environment
    ).stdout
