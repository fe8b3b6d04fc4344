"""Checks that the requirements of a directory of wheels are met.

    python check_wheels.py pack WHEELS    before packing: against the packages in host-has.txt
    python check_wheels.py host WHEELS    before installing: against the packages of this host

Requirements come from the wheels' metadata, with the extras that wheels require of each other.
Packages in left-out.txt are ignored. The exit status is 1 if a requirement is not met. On the host,
a version outside a bound is only reported, unless an exact version is required, because compiled
code works with that version only.
"""

import argparse
import contextlib
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(__file__).parent
TARGET = {
    "platform_machine": "x86_64",
    "python_full_version": "3.12.3",
    "python_version": "3.12",
}
"""Environment markers (PEP 508) of the target host that another Linux host may not have."""

Versions = Mapping[str, Version | None]
"""Available packages by canonical name; None: the version is unknown."""


@dataclass(frozen=True)
class Asked:
    """A requirement and the wheel that states it."""

    by: str
    requirement: Requirement

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def is_exact(self) -> bool:
        return any(bound.operator == "==" for bound in self.requirement.specifier)

    def is_met(self, there: Versions) -> bool:
        version = there.get(self.name)
        if version is None:
            return self.name in there
        return self.requirement.specifier.contains(version, prereleases=True)

    def is_covered(self, entry: Requirement) -> bool:
        """An entry without bounds covers every requirement of that name."""
        bounds_agree = not entry.specifier or entry.specifier == self.requirement.specifier
        return bounds_agree and entry.name == self.name

    def unmet(self, there: Versions) -> str:
        found = f"found {there[self.name]}" if self.name in there else "not found"
        return f"{self.by} requires {self.requirement.name}{self.requirement.specifier}: {found}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("where", choices=("pack", "host"))
    parser.add_argument("wheels", type=Path)
    arguments = parser.parse_args()
    wheels = sorted(arguments.wheels.glob("*.whl"))
    faults = before_packing(wheels) if arguments.where == "pack" else on_the_host(wheels)
    print("\n".join(faults) or f"the requirements of all {len(wheels)} wheels are met")  # noqa: T201
    return 1 if faults else 0


def before_packing(wheels: list[Path]) -> list[str]:
    """Faults of these wheels, or of the lists beside this file."""
    described = descriptions(wheels)
    there = {one.name: noted_version(one) for one in entries("host-has.txt")}
    there |= versions(described)
    asked = requirements(described, TARGET)
    needless = [
        f"left-out.txt: no wheel requires {entry}"
        for entry in entries("left-out.txt")
        if not any(one.is_covered(entry) for one in asked)
    ]
    return [one.unmet(there) for one in unmet(asked, there)] + needless


def on_the_host(wheels: list[Path]) -> list[str]:
    """Reasons why these wheels cannot work on this host. pip refuses those for another Python."""
    described = descriptions(wheels)
    asked = requirements(described)
    expected = [entry.name for entry in entries("host-has.txt")]
    there = installed([*expected, *(one.name for one in asked)]) | versions(described)
    faults = [
        f"host-has.txt lists {name}, but this host does not have it"
        for name in expected
        if name not in there
    ]
    for one in unmet(asked, there):
        if one.is_exact or one.name not in there:
            faults.append(one.unmet(there))
        else:
            print(f"note: {one.unmet(there)}")  # noqa: T201
    return faults


def installed(names: list[str]) -> dict[str, Version | None]:
    found: dict[str, Version | None] = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = Version(metadata.version(name))
    return found


def unmet(asked: list[Asked], there: Versions) -> list[Asked]:
    left_out = entries("left-out.txt")
    return [
        one
        for one in asked
        if not one.is_met(there) and not any(one.is_covered(entry) for entry in left_out)
    ]


def requirements(
    described: Mapping[str, Message], target: Mapping[str, str] | None = None
) -> list[Asked]:
    """Of all wheels, and of the extras that they require of each other.

    Args:
        target: the host that is asked for; None: this one.
    """
    found: dict[tuple[str, str], Asked] = {}
    open_ends = [(name, "") for name in described]
    seen = set(open_ends)
    while open_ends:
        name, extra = open_ends.pop()
        for line in described[name].get_all("Requires-Dist", []):
            requirement = Requirement(line)
            environment = {**(target or {}), "extra": extra}
            if requirement.marker and not requirement.marker.evaluate(environment):
                continue
            found[name, line] = asked = Asked(name, requirement)
            further = {(asked.name, wanted) for wanted in requirement.extras} - seen
            seen |= further
            open_ends += [end for end in further if end[0] in described]
    return [found[key] for key in sorted(found)]


def descriptions(wheels: list[Path]) -> dict[str, Message]:
    """The metadata of each wheel, by name."""
    found: dict[str, Message] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            described = BytesParser().parsebytes(archive.read(name), headersonly=True)
        found[canonicalize_name(described["Name"])] = described
    return found


def versions(described: Mapping[str, Message]) -> dict[str, Version | None]:
    return {name: Version(one["Version"]) for name, one in described.items()}


def noted_version(entry: Requirement) -> Version | None:
    exact = [bound.version for bound in entry.specifier if bound.operator == "=="]
    return Version(exact[0]) if exact else None


def entries(file: str) -> list[Requirement]:
    """The lines of a list beside this file, with canonical names."""
    lines = (line.partition("#")[0].strip() for line in (HERE / file).read_text().splitlines())
    found = [Requirement(line) for line in lines if line]
    for entry in found:
        entry.name = canonicalize_name(entry.name)
    return found


if __name__ == "__main__":
    sys.exit(main())
