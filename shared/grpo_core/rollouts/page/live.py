"""The page that shows runs while they train. Its data come from the service that serves it."""

from __future__ import annotations

from grpo_core.rollouts.page.document import document

_SCRIPTS = (
    *("data.js", "scales.js", "charts.js", "tokens.js", "filters.js", "groups.js"),
    *("live-words.js", "live-service.js", "live-state.js", "live-curves.js"),
    *("live-runs.js", "live-rollouts.js", "live-main.js"),
)


def live_document() -> tuple[bytes, str]:
    """The HTML, and the content-security policy to send with it in a header.

    The page asks only the service that serves it, below `api/`, and no other page can embed it.
    """
    rules = "connect-src 'self'; base-uri 'none'; form-action 'none'"
    content, policy = document("live.html", ["page.css", "live.css"], _SCRIPTS, policy=rules)
    # Browsers take the rule about frames only from a header.
    return content, f"{policy}; frame-ancestors 'none'"
