"""Labels come from the routes, never from a client's path."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from grpo_api.route_templates import UNMATCHED, RouteTemplates


async def answer(_request: Request) -> Response:
    return Response()


TEMPLATES = RouteTemplates(
    [Route("/batch", answer), Route("/batch/{batch_id}/ack", answer, methods=["POST"])]
)


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/batch", "/batch"),
        ("/batch/7/ack", "/batch/{batch_id}/ack"),
        ("/batch/7/ack/more", UNMATCHED),
        ("/%00", UNMATCHED),
        ("", UNMATCHED),
    ],
)
def test_a_path_is_named_by_its_route(path: str, template: str) -> None:
    assert TEMPLATES.template(path) == template
