"""What this project is built from: known vulnerabilities, software bill of materials and licences
of its dependencies. `make supply-chain` writes docs/contributing/supply-chain.md.

The tools are those of requirements/supply-chain.txt. Nothing here runs in `make docs`: the answers
depend on the day and need package indexes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import ssl
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import replace_section
from docs.generate.image_packages import ImageFixes, fixes_of
from docs.generate.markdown import table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing" / "supply-chain.md"
LOCK = ROOT / "requirements" / "lock-cpu.txt"
SPDX = {
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
"""Names of licences in the metadata of packages, and their identifiers."""
BY_FILE = {"oss-harmony": "Apache-2.0", "pysimdjson": "MIT", "setuptools": "MIT"}
"""Packages whose metadata name no licence: what their licence file is."""


@dataclass(frozen=True)
class Audit:
    """vulnerable: name, version, identifiers and versions with the fix; unchecked: packages of
    which no record of the used version was found; checked: number of the others."""

    vulnerable: list[tuple[str, str, str, str]]
    unchecked: list[str]
    checked: int


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=Path, required=True, help="directory of the tools")
    parser.add_argument("--output", type=Path, required=True, help="directory of the files")
    parser.add_argument("--images", nargs="*", default=[], help="images to look into")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    versions = locked()
    audit = audited(options.tools, options.output, versions)
    bill = options.output / "python.cdx.json"
    _run(options.tools / "cyclonedx-py", "requirements", LOCK, "--output-reproducible", "-o", bill)
    names = licences(options.tools, versions)
    replace_section(PAGE, "Known vulnerabilities", vulnerabilities_section(audit, options.tools))
    replace_section(PAGE, "Licences", licences_section(names, options.tools))
    fixes = [fixes_of(image, options.output) for image in options.images]
    if fixes:
        replace_section(PAGE, "Images", images_section(fixes))
    sys.stdout.write(
        f"{audit.checked} packages checked, {len(audit.unchecked)} not; known vulnerabilities: "
        f"{len(audit.vulnerable)}\nwrote {PAGE.relative_to(ROOT)}, and files in {options.output}\n"
    )
    return 1 if audit.vulnerable or not audit.checked else 0


def locked() -> dict[str, str]:
    """Version by package: the lock, and torch, which it leaves to an index of its own."""
    pinned = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
    found = {canonical(name): version for name, version in pinned.findall(LOCK.read_text())}
    constraints = dict(pinned.findall((LOCK.parent / "constraints.txt").read_text()))
    return found | {"torch": constraints["torch"]}


def canonical(name: str) -> str:
    """As of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def audited(tools: Path, output: Path, versions: Mapping[str, str]) -> Audit:
    """The answer of pip-audit. An index without records of single versions has at least that of a
    package's newest one."""
    wanted = output / "audited.txt"
    wanted.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    command = [str(tools / "pip-audit"), "--no-deps", "--disable-pip", "-r", str(wanted)]
    # Its status and its last line only say whether it found any, also if it could check nothing.
    done = subprocess.run(
        [*command, "--format", "json"], capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise SystemExit(f"pip-audit failed:\n{done.stderr}")
    found = json.loads(done.stdout)["dependencies"]
    skipped = [canonical(each["name"]) for each in found if "skip_reason" in each]
    records = {each["name"]: each["vulns"] for each in found if "skip_reason" not in each}
    records |= newest_records({name: versions[name] for name in skipped})
    (output / "audit.json").write_text(json.dumps(records, indent=2, sort_keys=True) + "\n")
    vulnerable = [
        (name, versions[canonical(name)], one["id"], ", ".join(one["fix_versions"]) or "no version")
        for name, known in sorted(records.items())
        for one in known
    ]
    unchecked = sorted(name for name in skipped if name not in records)
    return Audit(vulnerable, unchecked, len(records))


def newest_records(versions: Mapping[str, str]) -> dict[str, list[Any]]:
    """Vulnerabilities, as of pip-audit, of packages that are used in their newest version."""
    index = package_index()

    def ask(name: str) -> tuple[str, list[Any] | None]:
        answer = client.get(f"{index}/pypi/{name}/json")
        if answer.is_error:
            return name, None
        told = answer.json()
        if told["info"]["version"] != versions[name]:
            return name, None
        known = [one for one in told["vulnerabilities"] if not one["withdrawn"]]
        return name, [{"id": one["id"], "fix_versions": one["fixed_in"]} for one in known]

    with (
        httpx.Client(
            verify=ssl.create_default_context(), timeout=60, follow_redirects=True
        ) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        return {name: known for name, known in pool.map(ask, versions) if known is not None}


def package_index() -> str:
    """The root of the index that pip asks, by its configuration or by default. `pip config` does
    not show the default, but each command's help does."""
    command = [sys.executable, "-m", "pip", "download", "--help"]
    unwrapped = os.environ | {"COLUMNS": "10000"}
    said = subprocess.run(command, env=unwrapped, stdout=subprocess.PIPE, text=True, check=True)
    found = re.search(r"--index-url .*\(default (\S+)\)", said.stdout)
    assert found, "pip tells the default of --index-url"
    return found[1].rstrip("/").removesuffix("/simple")


def licences(tools: Path, versions: Mapping[str, str]) -> dict[str, list[str]]:
    """Packages by licence."""
    command = ("--python", sys.executable, "--with-system", "--format", "json")
    found: dict[str, list[str]] = defaultdict(list)
    for each in json.loads(_run(tools / "pip-licenses", *command)):
        name = canonical(each["Name"])
        if name in versions:
            first_line = each["License"].strip().partition("\n")[0]
            found[BY_FILE.get(name) or SPDX.get(first_line, first_line)].append(name)
    return found


def vulnerabilities_section(audit: Audit, tools: Path) -> list[str]:
    count = len({name for name, *_ in audit.vulnerable})
    lines = [
        f"{_day()}, {_version(tools / 'pip-audit')}: of {audit.checked + len(audit.unchecked)} "
        f"packages, {audit.checked} were checked, and {count} of these have a known vulnerability."
    ]
    if audit.vulnerable:
        head = ("Package", "Version", "Vulnerability", "Fixed in")
        lines += ["", table(head, audit.vulnerable)]
    if audit.unchecked:
        lines += [
            "",
            "Not checked, because the index has records of each package's newest version only, and "
            f"these are used in another one: {', '.join(audit.unchecked)}.",
        ]
    return lines


def licences_section(names: Mapping[str, list[str]], tools: Path) -> list[str]:
    rows = sorted(names.items(), key=lambda row: (-len(row[1]), row[0]))
    count = sum(map(len, names.values()))
    return [
        f"{_day()}, {_version(tools / 'pip-licenses')}: {count} packages, as their metadata say. "
        f"{', '.join(sorted(BY_FILE))} name none there; theirs is that of their licence file.",
        "",
        table(("Licence", "Packages"), [(name, ", ".join(sorted(of))) for name, of in rows]),
    ]


def images_section(images: Sequence[ImageFixes]) -> list[str]:
    head = ("Image", "Debian packages", "Python packages", "Of which Debian has a newer version")
    rows = [
        (
            image.name,
            str(image.debian),
            str(image.python),
            ", ".join(image.outdated) or "none",
        )
        for image in images
    ]
    return [f"{_day()}, {images[0].release}, {images[0].syft}:", "", table(head, rows)]


def _day() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def _version(tool: Path) -> str:
    return " ".join(_run(tool, "--version").split()[:2])


def _run(*words: object) -> str:
    return subprocess.run([*map(str, words)], stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
