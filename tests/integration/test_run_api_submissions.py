"""Groups are queued, buffered or refused as a whole; the trainer receives exactly what was sent.

`tests/unit/api` tests the planning itself, `test_run_store_large` how groups wait.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from grpo_core.wire.fields import FLOAT32_MAX
from tests.integration.conftest import StartApi
from tests.integration.run_api_calls import ApiClient, group
from tests.support.wait import DEADLINE_S, wait_for


@pytest.fixture
def four(http: ApiClient) -> ApiClient:
    """A run with batches of 8; environment 0 registered groups of 4."""
    http.start(batch_size=8)
    http.register_environment(group_size=4)
    return http


def test_parts_wait_until_they_add_up_and_are_served_as_they_were_sent(four: ApiClient) -> None:
    for marker, (size, waiting) in enumerate([(3, 3), (2, 5)]):
        answer = four.send_group(marker, size=size, env_id=0)
        assert answer == {"status": "buffered", "buffer_size": waiting}
    assert four.get("/latest_example").json()["tokens"] == []  # never a buffered part
    assert four.send_group(2, size=2, env_id=0) == {"status": "buffered", "buffer_size": 3}
    assert four.get("/latest_example").json()["tokens"] == group(2)["tokens"]
    four.submit(3, size=4, env_id=None)
    batch = four.get("/batch").json()["batch"]
    assert [item["tokens"] for item in batch] == [
        group(marker, size=size)["tokens"] for marker, size in ((1, 2), (2, 2), (3, 4))
    ]


def test_a_list_says_how_many_were_buffered_and_what_waits_at_the_end(four: ApiClient) -> None:
    body = [group(i, size=size, env_id=0) for i, size in enumerate([3, 4, 2, 1])]
    assert four.send_raw(body, "/scored_data_list").json() == {
        "status": "received",
        "groups_processed": 4,
        "buffered": 3,
        "last_buffer_size": 2,
    }
    assert four.status() == (0, 3)
    assert four.next_batch() == [1, 0, 3]


def test_a_key_stands_for_one_body_that_was_taken(http: ApiClient) -> None:
    http.start()

    def post(body: Any) -> httpx.Response:
        return http.post("/scored_data", json=body, headers={"Idempotency-Key": "key"})

    for refused in (group(1, scores=[1.0]), group(1, size=8)):
        assert post(refused).status_code == 422
    for _ in range(2):  # the key is still unused
        assert post(group(1)).json() == {"status": "received"}
    other = post(group(2))
    assert other.status_code == 422
    assert "'key' was used for other groups" in other.json()["detail"]
    assert http.status() == (0, 1)


def test_a_queue_that_stays_full_is_a_503_and_nothing_is_queued(own_api: StartApi) -> None:
    api = own_api("limited", further={"--max-queued-groups": 4, "--full-queue-wait-s": 0.5})
    with ApiClient(base_url=api.url, timeout=DEADLINE_S) as limited:
        limited.get("/reset_data").raise_for_status()
        limited.start()
        limited.register_environment()
        for markers, pressure in ((range(3), 0.5), (range(1), 1.0)):
            limited.submit(*markers, env_id=0)
            assert limited.told(0)["pressure"] == pressure
        answer = limited.post("/scored_data", json=group(8))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert "queue has been full" in answer.json()["detail"]
        assert limited.status() == (0, 4)
        # a limit below one batch does not stop the run
        limited.get("/reset_data").raise_for_status()
        limited.start(batch_size=16)
        limited.submit(*range(8))
        assert limited.next_batch() == list(range(8))


def test_a_group_that_waits_in_line_is_not_queued_once_its_sender_is_gone(
    own_api: StartApi,
) -> None:
    """An environment that is killed then samples the same prompt again once it is back."""
    api = own_api("left", further={"--max-queued-groups": 4, "--full-queue-wait-s": 60})
    with ApiClient(base_url=api.url, timeout=DEADLINE_S) as left:
        left.start()
        left.register_environment()
        left.submit(*range(4), env_id=0)
        with pytest.raises(httpx.ReadTimeout):
            left.post("/scored_data", json=group(8, env_id=0), timeout=1.0)
        ended = 'run_api_requests_total{method="POST",route="/scored_data",status="503"} 1'
        metrics = wait_for(lambda: left.get("/metrics").text, lambda text: ended in text)
        series = 'run_api_request_duration_seconds_sum{route="/scored_data"} '
        assert float(metrics.split(series)[1].split()[0]) < 60
        assert left.status() == (0, 4)


SIZE = 2
OPTIONAL = {
    *("advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs"),
    *("overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs"),
}
ALL_KEYS = {"tokens", "masks", "scores", *OPTIONAL}
ODD = {'é"\\': [[{"x": [1.5, -0.0, 1e300, 2**53]}], "[", "", None, True, {}]}
USUAL = group(1) | {
    "scores": [-0.1, FLOAT32_MAX],
    "inference_logprobs": [[1.0, 1.0, -0.25], [1.0, 1.0, -1e-30]],
    "messages": [[ODD | {"role": "user", "content": "a [bracket] é"}], []],
    "overrides": [ODD, {}],
    "group_overrides": {"policy_version": [[[0, 1], [0, 1]], [[0, 1], [0, 2]]]},
    "generation_params": ODD | {"temperature": 0.7},
    "images": ODD,
}
SENT = [
    group(2**31 - 1),
    group(1, **dict.fromkeys(OPTIONAL)),
    group(1, advantages=[], inference_logprobs=[], messages=[], overrides=[]),
    USUAL,
    USUAL | {"env_id": 7, "advantages": [[0.5, -1.5], [2.25]], "ref_logprobs": [[-0.5]] * 2},
    # of integers or rare fields, so that the group is encoded again
    USUAL | {"scores": [0.0, 1.0], "advantages": [[], [3.0]]},
    group(
        1,
        distill_token_ids=[[[4, 5], [], [6]], [[], [], [7]]],
        distill_logprobs=[[[-0.5, -1.5], [], [-2.0]], [[], [], [-0.25]]],
    ),
]


def served(http: ApiClient, body: Any, path: str = "/scored_data") -> dict[str, Any]:
    """The group that the trainer receives. Each group fills a batch."""
    answer = http.send_raw(body, path)
    assert (answer.status_code, answer.json()["status"]) == (200, "received")
    (item,) = http.get("/batch").json()["batch"]
    return dict(item)


@pytest.mark.parametrize("sent", SENT)
def test_every_group_is_served_with_all_keys_as_it_was_sent(
    http: ApiClient, sent: dict[str, Any]
) -> None:
    """A single group is stored as sent, if it is a usual one. Others are encoded again."""
    http.start(batch_size=SIZE)
    expected = dict.fromkeys(ALL_KEYS) | sent
    assert served(http, sent) == expected
    assert served(http, [sent], "/scored_data_list") == expected
