"""Puts a page together: HTML, CSS and JavaScript of `static/` in one document, and its policy.

The live page is such a document. Its data come from the service that serves it.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import NamedTuple

_STATIC = resources.files("grpo_core.rollouts.page") / "static"
_FRAGMENTS = ("filters.html", "groups.html")
_NOTHING: Mapping[str, str] = {}
_SCRIPTS = ("data.js", "scales.js", "charts.js", "tokens.js", "filters.js", "groups.js")
_SCRIPTS_OF_LIVE_PAGE = (
    *("live-words.js", "live-service.js", "live-state.js", "live-curves.js"),
    *("live-rollouts.js", "live-main.js"),
)


class Document(NamedTuple):
    content: bytes
    """The HTML, which contains the policy too."""
    policy: str
    """The content-security policy."""


def document(
    template: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    values: Mapping[str, str] = _NOTHING,
    policy: str = "",
) -> Document:
    """A page whose browser runs no script and no style but those of the page.

    Args:
        template: like the styles and scripts, the name of a file in `static/`
        scripts: those that other pages do not have; they come last
        values: texts by the names that they replace in the template. A text may contain a name
            only if no later value has this name.
        policy: more of the content-security policy. Without it, the page can ask no network.
    """
    style = "\n".join(_static(name) for name in styles)
    script = "\n".join(_static(name) for name in (*_SCRIPTS, *scripts))
    rules = [f"script-src {_digest(script)}", f"style-src {_digest(style)}", policy]
    whole = "; ".join(["default-src 'none'", *filter(None, rules)])
    page = _static(template)
    fragments = {f"{{{{{name.removesuffix('.html')}}}}}": _static(name) for name in _FRAGMENTS}
    fixed = {"{{policy}}": html.escape(whole), "{{style}}": style, "{{script}}": script}
    for name, value in {**fragments, **fixed, **values}.items():
        before, after = page.split(name)
        page = before + value + after
    return Document(page.encode("utf-8", "xmlcharrefreplace"), whole)


def live_document() -> tuple[bytes, str]:
    """The HTML, and the content-security policy to send with it in a header.

    The page asks only the service that serves it, below `api/`, and no other page can embed it.
    """
    rules = "connect-src 'self'; base-uri 'none'; form-action 'none'"
    styles = ["page.css", "live.css"]
    content, policy = document("live.html", styles, _SCRIPTS_OF_LIVE_PAGE, policy=rules)
    # Browsers take the rule about frames only from a header.
    return content, f"{policy}; frame-ancestors 'none'"


def _static(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
