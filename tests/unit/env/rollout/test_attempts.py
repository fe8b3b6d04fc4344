"""What is recorded of attempts, and whether losses fall on some items more than on others."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from structlog.testing import capture_logs

from grpo_env.rollout.attempts import BLOCK, LossBias, LossEvidence
from grpo_env.rollout.producer import GroupProducer
from grpo_env.settings import EnvServerSettings
from grpo_env.tasks.item_stream import ItemStream
from tests.support.canned import PROMPT, generate_answer
from tests.unit.env.feeding import Rewarded
from tests.unit.env.rollout.rig import PLAN, engine_on, item_of


async def test_a_group_tells_of_the_attempts_that_its_item_lost(tmp_path: Path) -> None:
    rewards = iter([1.0, math.nan, 1.0, 1.0, 0.0, 1.0])  # lost, dropped without a loss, sent
    item, client = item_of(Rewarded(lambda *_: next(rewards))), Mock(submit=AsyncMock())
    answers = (200, generate_answer(["7", "8"]))
    async with engine_on(lambda _body: answers) as (engine, _):
        settings = EnvServerSettings(
            task="arithmetic", model="m", max_failed_rewards=1.0, untrained_dir=tmp_path
        )
        items = ItemStream([([item], 1.0)], seed=0)
        producer = GroupProducer(settings, items, engine, client)
        for step in range(3):
            await producer.produce(PLAN, step)
    ((group, *_),) = (call.args for call in client.submit.call_args_list)
    assert group.group_overrides["attempts"] == {"tried": 3, "quarantined_reward": 1}
    (line,) = map(json.loads, (tmp_path / "lost.jsonl").read_text().splitlines())
    assert "which is not finite" in line.pop("detail")
    assert line.pop("time") > 0
    assert line == {
        **{"step": 1, "task": "rewarded", "item": item.key, "place": item.place, "attempt": 1},
        **{"reason": "quarantined_reward", "prompt_tokens": len(PROMPT), "mean_score": None},
        "completion_tokens": sum(map(len, group.masks)) - 2 * len(PROMPT),
    }


@pytest.mark.parametrize("values", [[1, 2, 3, 4, 5, 6], [1, 1, 1, 1, 1, 9], [1, 1, 2, 2, 2, 3]])
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_the_mean_evidence_of_all_ways_to_lose_attempts_is_at_most_1(
    values: list[float], lost: int
) -> None:
    ways = [*combinations(range(len(values)), lost)]
    evidence = [
        math.exp(
            LossEvidence().add(
                [values[at] for at in way],
                [value for at, value in enumerate(values) if at not in way],
            )
        )
        for way in ways
    ]
    assert 0.1 < sum(evidence) / len(ways) <= 1
    assert max(evidence) == pytest.approx(evidence[-1])  # the highest were lost


@pytest.mark.parametrize(
    ("share", "warned"),
    [
        (lambda length: 0.1 * (length > 150), ["longer prompts"]),
        (lambda _length: 0.15, []),
    ],
)
def test_losses_of_long_items_warn_and_others_do_not(
    share: Callable[[float], float], warned: list[str]
) -> None:
    drawn, bias = random.Random(0), LossBias()
    with capture_logs() as logs:
        for number in range(24 * BLOCK):
            length = drawn.lognormvariate(4.5, 0.7)
            reason = "failed_rollout" if drawn.random() < share(length) else ""
            tokens = drawn.randrange(100)
            bias.add("sums", number // BLOCK, reason, (length, tokens, tokens, -tokens))
    assert [line["towards"] for line in logs] == warned
    for line in logs:
        assert (line["event"], line["task"], line["reason"]) == (
            *("attempts.biased", "sums", "failed_rollout"),
        )
        assert line["mean_lost"] > 150 > line["mean_others"]
        assert "lost.jsonl" in line["hint"]
