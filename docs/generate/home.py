"""The table of README's section "I want to …", for the first page."""

from __future__ import annotations

from docs.generate.source import ROOT

_SECTION = "## I want to …"


def table() -> str:
    """Raises `ValueError`: README has no such section."""
    section = (ROOT / "README.md").read_text().split(_SECTION)[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return "\n".join(rows).replace("](docs/", "](")
