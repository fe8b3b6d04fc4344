"""The introduction of README and its table "I want to …", for the first page."""

from __future__ import annotations

from docs.generate.source import ROOT

_SECTION = "## I want to …"


def table() -> str:
    """Raises `ValueError`: README has no such section."""
    section = (ROOT / "README.md").read_text().split(_SECTION)[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return _for_the_site("\n".join(rows))


def introduction() -> str:
    """All above README's first section."""
    return _for_the_site(
        (ROOT / "README.md").read_text().split("\n## ")[0].split("\n", 1)[1].strip()
    )


def _for_the_site(text: str) -> str:
    return text.replace("](docs/", "](")
