"""Checks images for common security faults: `python check_images.py [--base IMAGE] IMAGE...`.

Finds secrets (private keys, tokens in variables, files with credentials) in every layer, even if a
later layer removes them; files that every user can write; setuid files; images that run as root.
Layers of the base image are skipped. The exit status is 1 if a fault is found.
"""

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

CREDENTIALS = re.compile(
    r"(^|/)(\.env|\.netrc|\.pypirc|pip\.conf|id_(rsa|ed25519|ecdsa)|ca_bundle)$"
)
PRIVATE_KEY = re.compile(rb"^-----BEGIN [A-Z ]*PRIVATE KEY-----", re.MULTILINE)
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|PASSWORD|PASSWD|SECRET|API_KEY|ACCESS_KEY)(_|$)", re.IGNORECASE
)
EXAMPLES = re.compile(r"(^|/)(tests?|testing|examples?|docs?)/")
"""Keys in these directories are published examples."""
LARGEST_KEY_FILE = 64 * 1024
ROOT_USERS = ("", "0", "root", "0:0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", nargs="+")
    parser.add_argument("--base", help="image whose layers are passed over")
    arguments = parser.parse_args()
    found = [fault for image in arguments.images for fault in faults_of(image)]
    found += faults_in_layers(arguments.images, layers_of(arguments.base) if arguments.base else [])
    print("\n".join(found) or f"nothing found in {len(arguments.images)} images")  # noqa: T201
    return 1 if found else 0


def faults_of(image: str) -> Iterator[str]:
    """Those that its configuration shows."""
    config = inspect(image)["Config"]
    if config["User"] in ROOT_USERS:
        yield f"{image}: runs as root"
    for variable in config["Env"] or ():
        name, _, value = variable.partition("=")
        if value and SECRET_NAME.search(name):
            yield f"{image}: variable {name} looks like a secret"


def faults_in_layers(images: list[str], passed_over: list[str]) -> Iterator[str]:
    """Saved together: what images share is looked at once."""
    seen = set(passed_over)
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory) / "images.tar"
        subprocess.run(["docker", "save", "--output", str(archive), *images], check=True)
        with tarfile.open(archive) as saved:
            for described in json.load(member(saved, "manifest.json")):
                (image, *_) = described["RepoTags"]
                for identity, name in zip(layers_of(image), described["Layers"], strict=True):
                    if identity in seen:
                        continue
                    seen.add(identity)
                    with tarfile.open(fileobj=member(saved, name), mode="r:*") as layer:
                        yield from (f"{image}: {fault}" for fault in faults_in(layer))


def faults_in(layer: tarfile.TarFile) -> Iterator[str]:
    for entry in layer:
        if not entry.isfile():
            continue
        if entry.mode & 0o002:
            yield f"{entry.name}: everybody may write it"
        if entry.mode & 0o6000:
            yield f"{entry.name}: runs as its owner (setuid)"
        # Where a secret was mounted while a layer was made, an empty file stays.
        if entry.size and CREDENTIALS.search(entry.name):
            yield f"{entry.name}: holds credentials, by its name"
        if 0 < entry.size <= LARGEST_KEY_FILE and not EXAMPLES.search(entry.name):
            content = layer.extractfile(entry)
            if content is not None and PRIVATE_KEY.search(content.read()):
                yield f"{entry.name}: holds a private key"


def layers_of(image: str) -> list[str]:
    layers: list[str] = inspect(image)["RootFS"]["Layers"]
    return layers


def inspect(image: str) -> dict[str, Any]:
    listed = subprocess.run(["docker", "inspect", image], capture_output=True, check=True).stdout
    found: dict[str, Any] = json.loads(listed)[0]
    return found


def member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    assert file is not None, f"{name} is no file of the archive"
    return file


if __name__ == "__main__":
    sys.exit(main())
