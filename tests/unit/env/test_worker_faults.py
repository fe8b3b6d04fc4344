"""Failures that the main loop survives, and failures that end it with a named error."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.errors import ServiceUnavailable
from grpo_env.inference.pool import NoGenerateRoute
from grpo_env.pacing import MAX_REFUSED_IN_A_ROW, EveryGroupRefused, NoTrainer
from tests.support.canned import inference_routes
from tests.support.http_stub import Answer, DropConnection, Route
from tests.unit.env.feeding import RunApi, feed, right_and_wrong, run


def failing_twice(route: Route) -> Route:
    """First status 500, which clients do not repeat, then a broken connection, then the route's
    answer."""
    left = iter([500, None])

    def answer(body: dict[str, Any]) -> Answer:
        for failure in left:
            if failure is None:
                raise DropConnection
            return failure, {"detail": "not now"}
        return route(body)

    return answer


@pytest.mark.parametrize(
    "route",
    ["POST /register-env", "GET /info", "GET /status-env", "POST /scored_data", "POST /generate"],
)
async def test_a_server_that_fails_for_a_while_is_survived_wherever_it_fails(route: str) -> None:
    api = RunApi(num_steps=2)
    api_routes, engine_routes = api.routes(), inference_routes(right_and_wrong)
    routes = api_routes if route in api_routes else engine_routes
    routes[route] = failing_twice(routes[route])

    await feed(api_routes, engine_routes)

    assert len(api.groups) >= 4
    assert api.disconnected == [0]


async def test_a_queue_that_is_full_for_a_while_loses_no_group() -> None:
    """run-api delays a submission and then requests it again. No other group is sampled for
    that."""
    api = RunApi(num_steps=2)
    routes = api.routes()
    full = iter([(503, {"detail": "the queue has been full"}, {"Retry-After": "0.3"})] * 6)
    routes["POST /scored_data"] = lambda body: next(full, None) or api.submit(body)

    _, inference = await feed(
        routes, inference_routes(right_and_wrong), "--env.max-batches-offpolicy=1"
    )

    assert len(api.groups) >= 4
    # Groups that are being sampled when the last batch is delivered are dropped.
    assert len(inference.bodies("POST /generate")) <= len(api.groups) + 2


async def test_groups_that_a_reset_made_homeless_are_no_reason_to_give_up() -> None:
    api = RunApi(num_steps=10)
    routes = api.routes()
    homeless = iter(range(2 * MAX_REFUSED_IN_A_ROW))

    def submit(body: dict[str, Any]) -> Answer:
        if next(homeless, None) is not None:
            return 409, {"detail": "no trainer has registered"}
        return api.submit(body)

    routes["POST /scored_data"] = submit
    await feed(routes, inference_routes(right_and_wrong))

    assert len(api.groups) >= 20


def answering(status: int, detail: str) -> Route:
    return lambda _body: (status, {"detail": detail})


IN_VAIN = {
    "an inference server that stays broken": (
        *("POST /generate", answering(500, "broken"), ["--openai.request-deadline-s=0.6"]),
        *(ServiceUnavailable, r"vllm-server answered no request successfully for [\d.]+ s"),
    ),
    "a server without generate": (
        *("POST /generate", answering(404, "Not Found"), []),
        *(NoGenerateRoute, r"404 Not Found on /generate at http.*\(stock vLLM has no /generate\)"),
    ),
    "an inference server that refuses every request": (
        *("POST /generate", answering(422, "unknown parameter"), []),
        *(EveryGroupRefused, "inference server refused.*unknown parameter"),
    ),
    "a run-api that refuses every group": (
        *("POST /scored_data", answering(422, "no"), []),
        *(EveryGroupRefused, "run-api refused.*no"),
    ),
    "a run-api that takes no group and answers all else": (
        *("POST /scored_data", answering(503, "slow"), ["--env.run-api-deadline-s=0.5"]),
        *(ServiceUnavailable, r"run-api answered no request successfully for [\d.]+ s.*slow"),
    ),
}


@pytest.mark.parametrize(
    ("route", "answer", "options", "error", "says"), IN_VAIN.values(), ids=IN_VAIN.keys()
)
async def test_a_service_that_never_works_ends_the_work_with_a_name_and_a_goodbye(
    route: str, answer: Route, options: list[str], error: type[Exception], says: str
) -> None:
    api = RunApi(num_steps=1000)
    api_routes, engine_routes = api.routes(), inference_routes(right_and_wrong)
    (api_routes if route in api_routes else engine_routes)[route] = answer

    with pytest.raises(error, match=says):
        await feed(api_routes, engine_routes, *options)
    assert api.disconnected == [0]


async def test_a_trainer_that_never_comes_ends_the_work() -> None:
    api = RunApi(polls_before_trainer=100)

    with pytest.raises(NoTrainer, match=r"within 0\.3 s"):
        await run(api, right_and_wrong, "--env.trainer-deadline-s=0.3")


async def test_a_trainer_that_takes_no_batch_any_more_ends_the_work() -> None:
    api = RunApi()
    api.takes_batches = False

    with pytest.raises(NoTrainer, match=r"the trainer took no batch for 0\.5 s"):
        await run(api, right_and_wrong, "--env.trainer-deadline-s=0.5")
    assert api.disconnected == [0]
