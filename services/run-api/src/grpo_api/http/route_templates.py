"""Which route a path belongs to: a bounded set of names for an unbounded set of paths."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Route

UNMATCHED = "unmatched"
"""What every path without a route is called."""


class RouteTemplates:
    """Looked up by path alone: requests that are refused before they are routed have one too."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        known = [route for route in routes if isinstance(route, Route)]
        self._without_parameters = {r.path for r in known if not r.param_convertors}
        self._with_parameters = [(r.path_regex, r.path) for r in known if r.param_convertors]

    def template(self, path: str) -> str:
        """`/batch/{batch_id}/ack` for `/batch/7/ack`."""
        if path in self._without_parameters:
            return path
        for pattern, template in self._with_parameters:
            if pattern.match(path):
                return template
        return UNMATCHED
