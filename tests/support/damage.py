"""Files that are damaged: what a crash, a full disk, another program or an enemy leaves of them.

`damages(path)` draws what happens to one file: bytes are lost or changed, a value in it has another
type, or something else is in its place. The file's form is kept where it has one: values change
inside gzip, JSON, lines of JSON, YAML and the header of safetensors.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

_DEEP, _LONG = "@deep@", "@long@"
_RAW = {_DEEP: "[" * 20_000 + "]" * 20_000, _LONG: "9" * 5000}
"""What json.dumps refuses to write, by the text that stands for it."""
ODD: Sequence[Any] = (
    *(None, True, -1, 0, 1.5, 2**63, 10**400, float("nan"), float("inf"), 1e300),
    *("", "x", "\ud800", "a\0b", "../../x", "x" * 5000, [], {}, [[]], [None], {"": None}),
    *(_DEEP, _LONG),
)
"""Values that no file of ours has at most places."""
_HEADER = struct.Struct("<Q")
Place = Callable[[Path], object]
PLACES: dict[str, Place] = {
    "nothing": lambda _: None,
    "a directory": lambda path: path.mkdir(),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}
"""What is in the place of a file."""
Damage = bytes | str
"""The new content, or one of `PLACES`."""


def damages(path: Path) -> st.SearchStrategy[Damage]:
    content = path.read_bytes()
    return st.one_of(st.sampled_from(sorted(PLACES)), of_bytes(content), of_values(content, path))


@contextlib.contextmanager
def damaged(path: Path, damage: Damage) -> Iterator[None]:
    """The file is damaged while the context is open."""
    whole = path.read_bytes()
    path.unlink()
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        PLACES[damage](path)
    try:
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.write_bytes(whole)


@st.composite
def of_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    at = draw(st.integers(0, max(0, len(content) - 1)))
    end = draw(st.integers(at, len(content)))
    found: bytes = draw(
        st.sampled_from(
            [
                b"",
                content[:at],
                content[:at] + content[end:],
                content[:at] + bytes(end - at) + content[end:],
                content[:at] + bytes([content[at] ^ 1 << end % 8]) + content[at + 1 :],
                content[:at] + b"\xff\xfe" + content[at:],
                content + content,
                content.decode("latin-1").encode("utf-16"),
            ]
            if content
            else [b"", b"\0", b"\xff", b"{}\n"]
        )
    )
    return found


@st.composite
def of_values(draw: st.DrawFn, content: bytes, path: Path) -> bytes:
    """A value is another one, or missing."""
    if content.startswith(b"\x1f\x8b"):
        return gzip.compress(draw(of_values(gzip.decompress(content), path)), 1)
    if path.suffix == ".safetensors":
        (length,) = _HEADER.unpack(content[:8])
        header = draw(_of_tree(json.loads(content[8 : 8 + length])))
        return _HEADER.pack(len(header)) + header + content[8 + length :]
    if path.suffix in (".yaml", ".yml"):
        return draw(_of_tree(yaml.safe_load(content))).replace(b": NaN", b": .nan")
    try:
        tree = json.loads(content)
    except ValueError:
        return draw(_of_lines(content))
    return draw(_of_tree(tree))


@st.composite
def _of_lines(draw: st.DrawFn, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    at = draw(st.integers(0, max(0, len(lines) - 1)))
    try:
        lines[at] = draw(_of_tree(json.loads(lines[at]))) + b"\n"
    except (ValueError, IndexError):  # no JSON
        return draw(of_bytes(content))
    return b"".join(lines)


@st.composite
def _of_tree(draw: st.DrawFn, tree: Any) -> bytes:
    spot = draw(st.sampled_from([*_spots(tree)]))
    changed = _with(tree, spot, draw(st.sampled_from([_Missing, *ODD])))
    text = json.dumps(changed, default=str)
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


class _Missing:
    """The value is left out."""


Spot = tuple[Any, ...]


def _spots(tree: Any, above: Spot = ()) -> Iterator[Spot]:
    """The places of values, of long lists only the first ones."""
    yield above
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _spots(value, (*above, key))
    elif isinstance(tree, list):
        for at, value in enumerate(tree[:3]):
            yield from _spots(value, (*above, at))


def _with(tree: Any, spot: Spot, value: Any) -> Any:
    if not spot:
        return None if value is _Missing else value
    first, *rest = spot
    inner = value if not rest else _with(tree[first], tuple(rest), value)
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = {key: inner if key == first else held for key, held in pairs}
    if inner is _Missing:
        del found[first]
    return found if isinstance(tree, dict) else [*found.values()]
