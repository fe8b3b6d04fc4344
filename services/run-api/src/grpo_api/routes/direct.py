"""A route that calls its endpoint with the request alone."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class DirectRoute(APIRoute):
    """For the one call that every group of a run takes: resolving parameters would be a tenth of
    what it costs. They are declared all the same, for the OpenAPI document; the endpoint is called
    as `endpoint(request)` and reads them itself.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint
