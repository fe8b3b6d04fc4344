"""Reads the code of documentation pages, so that tests run what users copy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def block(page: str, language: str, containing: str) -> str:
    """The page's one block of code in `language` that contains the text.

    Args:
        page: path below the repository's root
    """
    blocks = re.findall(rf"(?s)```{language}\n(.*?)```", (ROOT / page).read_text())
    (found,) = (code for code in blocks if containing in code)
    return str(found)


def command(page: str, containing: str, replacements: Mapping[str, str] | None = None) -> list[str]:
    """The words of the page's one command that contains the text.

    Args:
        replacements: texts of the page, such as addresses, and what they are in the test
    """
    text = block(page, "bash", containing).replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if containing in line)
    for written, real in (replacements or {}).items():
        line = line.replace(written, real)
    return shlex.split(line)
