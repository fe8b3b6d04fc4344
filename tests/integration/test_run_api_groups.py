"""The trainer receives exactly the scored group that the environment sent."""

from __future__ import annotations

from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.wire.fields import FLOAT32_MAX
from tests.integration.run_api_calls import group, send_raw, start

SIZE = 2
EXAMPLES = settings().max_examples // 2
ALL_KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages"),
    *("generation_params", "inference_logprobs", "overrides", "group_overrides", "images"),
    *("env_id", "distill_token_ids", "distill_logprobs"),
}

NUMBERS = st.floats(-FLOAT32_MAX, FLOAT32_MAX)
TOKENS = st.integers(0, 2**31 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=3)
MESSAGES = st.builds(
    lambda more, role, content: more | {"role": role, "content": content},
    *(OBJECTS, st.text(), st.text() | st.lists(OBJECTS, max_size=2)),
)


def per_sequence(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=SIZE, max_size=SIZE)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    """Any valid group of two sequences."""
    lengths = draw(per_sequence(st.integers(1, 4)))

    def per_token(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[list[Any]]]:
        return st.tuples(*(st.lists(values, min_size=n, max_size=n) for n in lengths)).map(list)

    optional = {
        **dict.fromkeys(("advantages", "ref_logprobs"), per_sequence(st.lists(NUMBERS))),
        "inference_logprobs": per_token(NUMBERS),
        "messages": per_sequence(st.lists(MESSAGES, max_size=2)),
        "overrides": per_sequence(OBJECTS),
    }
    sent = draw(
        st.fixed_dictionaries(
            {
                "tokens": per_token(TOKENS),
                "masks": per_token(st.integers(-100, 2**31 - 1)),
                "scores": per_sequence(NUMBERS),
            },
            optional={
                **{name: st.none() | st.just([]) | values for name, values in optional.items()},
                **dict.fromkeys(("generation_params", "group_overrides"), st.none() | OBJECTS),
                "images": JSON,
                "env_id": st.none() | TOKENS,
            },
        )
    )
    if draw(st.booleans()):
        choices = draw(per_token(st.lists(st.tuples(TOKENS, NUMBERS), max_size=2)))
        for name, part in (("distill_token_ids", 0), ("distill_logprobs", 1)):
            sent[name] = [[[one[part] for one in at] for at in row] for row in choices]
    return sent


def served(http: httpx.Client, body: Any, path: str = "/scored_data") -> dict[str, Any]:
    """The group that the trainer receives. Each group fills a batch."""
    answer = send_raw(http, body, path)
    assert (answer.status_code, answer.json()["status"]) == (200, "received")
    (item,) = http.get("/batch").json()["batch"]
    return dict(item)


def test_every_group_is_served_with_all_keys_as_it_was_sent(run_api_url: str) -> None:
    """A single group is stored as sent. A group of a list is encoded again."""
    with httpx.Client(base_url=run_api_url) as http:
        http.get("/reset_data").raise_for_status()
        start(http, batch_size=SIZE)

        @settings(max_examples=EXAMPLES)
        @given(groups())
        def is_served_as_sent(sent: dict[str, Any]) -> None:
            expected = dict.fromkeys(ALL_KEYS) | sent
            assert served(http, sent) == expected
            assert served(http, [sent], "/scored_data_list") == expected

        is_served_as_sent()


def test_numbers_are_coerced_and_unknown_fields_dropped(http: httpx.Client) -> None:
    start(http, batch_size=SIZE)
    loose = {
        "tokens": [[1.0, "7", 90], [1, 7, 91]],
        "masks": [["-100", -100.0, 90], [-100, -100, 91]],
        "scores": ["1.5", 2],
        "env_id": "3",
        "surprise": {"x": 1},
    }
    coerced = group(1) | {"scores": [1.5, 2.0], "env_id": 3}
    assert served(http, loose) == dict.fromkeys(ALL_KEYS) | coerced
