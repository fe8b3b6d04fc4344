"""RESULTS.md: every benchmark owns the section under its own heading and leaves the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_TITLE = "# Results"
_SECTION = "## "


def replace_section(path: Path, name: str, body: Sequence[str]) -> None:
    """Write `body` under the heading `name`, in the old place where it was there already."""
    old = path.read_text().splitlines() if path.exists() else [_TITLE]
    heading = _SECTION + name
    start = old.index(heading) if heading in old else len(old)
    end = next((at for at in range(start + 1, len(old)) if old[at].startswith(_SECTION)), len(old))
    before, after = _stripped(old[:start]), _stripped(old[end:])
    section = [heading, "", *_stripped(list(body))]
    text = "\n\n".join("\n".join(part) for part in (before, section, after) if part)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    os.replace(temporary, path)


def _stripped(lines: list[str]) -> list[str]:
    """Without blank lines at either end."""
    return "\n".join(lines).strip("\n").split("\n") if any(lines) else []
