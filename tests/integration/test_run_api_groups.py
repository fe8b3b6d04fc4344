"""The trainer receives exactly the scored group that the environment sent."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.wire.fields import FLOAT32_MAX
from tests.integration.run_api_calls import ApiClient, group

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


def test_numbers_are_coerced_and_unknown_fields_dropped(http: ApiClient) -> None:
    http.start(batch_size=SIZE)
    loose = {
        "tokens": [[1.0, "7", 90], [1, 7, 91]],
        "masks": [["-100", -100.0, 90], [-100, -100, 91]],
        "scores": ["1.5", 2],
        "env_id": "3",
        "surprise": {"x": 1},
    }
    coerced = group(1) | {"scores": [1.5, 2.0], "env_id": 3}
    assert served(http, loose) == dict.fromkeys(ALL_KEYS) | coerced
