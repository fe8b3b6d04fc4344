"""`python pack_wheels.py DIR [CAPABILITY] >ARCHIVE` packs the wheels in DIR into one .tar.xz.

Wheels compress each file alone, with deflate. This script stores the files uncompressed and
compresses the whole archive, which saves 20 %: CUDA code repeats over many megabytes. With
CAPABILITY, for example 90, code that a GPU of this compute capability does not run is left out.
"""

import io
import lzma
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

PRESET = 1
"""Preset of xz. Presets 3 and 6 save 3 and 9 % more, but take 1.4 and 3.2 times as long."""
MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""Start of a container of CUDA code ("fatbin"): its magic number, version, and size of this header,
which ends with the size of the rest."""
CONTAINER, ENTRY = struct.Struct("<8sQ"), struct.Struct("<HHIQ12xI")
"""Headers. Of an entry: kind, version, size of the header and of the code; compute capability."""
BINARY = 2
"""Kind of an entry with machine code. Others hold PTX, which the driver compiles for newer GPUs."""


class Entry(NamedTuple):
    """Its header and its code."""

    kind: int
    capability: int
    content: bytes


def pack(wheels: list[Path], into: BinaryIO, capability: int = 0) -> None:
    with (
        lzma.open(into, "wb", preset=PRESET) as packed,
        tarfile.open(None, "w|", packed) as archive,
    ):
        for wheel in wheels:
            content = stored(wheel, capability)
            member = tarfile.TarInfo(wheel.name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def stored(wheel: Path, capability: int) -> bytes:
    """The same wheel with uncompressed members. RECORD stays valid, because it hashes contents;
    of libraries that lost code it does not, and pip does not look."""
    content = io.BytesIO()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(content, "w") as new:
        for member in old.infolist():
            read = old.read(member)
            if capability and member.filename.endswith(".so"):
                read = without_other_code(read, capability)
            new.writestr(member, read, compress_type=zipfile.ZIP_STORED)
    return content.getvalue()


def without_other_code(library: bytes, capability: int) -> bytes:
    """The library with containers that hold only what runs, followed by zeros: machine code if
    there is some, else PTX. A container without either stays as it is."""
    changed, at = bytearray(library), library.find(MAGIC)
    while at >= 0:
        begin, size = at + CONTAINER.size, CONTAINER.unpack_from(library, at)[1]
        entries = [*entries_of(library[begin : begin + size])]
        runs = [each for each in entries if each.kind == BINARY and runs_on(each, capability)]
        kept = runs or [each for each in entries if each.kind != BINARY] or entries
        content = b"".join(each.content for each in kept)
        CONTAINER.pack_into(changed, at, MAGIC, len(content))
        changed[begin : begin + size] = content.ljust(size, b"\0")
        at = library.find(MAGIC, begin + size)
    return bytes(changed)


def runs_on(entry: Entry, capability: int) -> bool:
    """Machine code runs on GPUs of the same major and no lower minor capability."""
    return entry.capability // 10 == capability // 10 and entry.capability <= capability


def entries_of(container: bytes) -> Iterator[Entry]:
    at = 0
    while at < len(container):
        kind, _, header, size, capability = ENTRY.unpack_from(container, at)
        yield Entry(kind, capability, container[at : at + header + size])
        at += header + size


if __name__ == "__main__":
    directory, *only = sys.argv[1:]
    pack(sorted(Path(directory).glob("*.whl")), sys.stdout.buffer, *map(int, only))
