"""Examples in the pages: a file of the repository, or one function of it."""

from __future__ import annotations

import ast

from docs.generate.source import ROOT, parsed


def code(of: str) -> str:
    """Args: of: `path`, or `path:function`"""
    path, _, name = of.partition(":")
    text = (ROOT / path).read_text()
    if name:
        (node,) = (node for node in parsed(ROOT / path).body if getattr(node, "name", "") == name)
        text = ast.get_source_segment(text, node) or ""
    return f"```python\n{text.strip()}\n```"
