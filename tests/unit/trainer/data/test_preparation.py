"""Fields of the wire format that the trainer does not use are named."""

from __future__ import annotations

from structlog.testing import capture_logs

from grpo_core.clients.run_api_answers import LeasedBatch
from grpo_trainer.data.filter import GroupFilter
from tests.unit.trainer.groups import LIMITS, good, preparation


def test_a_teachers_logprobs_are_named_once() -> None:
    prepared = preparation(GroupFilter(LIMITS))
    plain = good(0)
    taught = good(1).model_copy(update={"distill_logprobs": [[[-0.1]]]})
    with capture_logs() as logs:
        for number, groups in enumerate([[plain], [plain, taught], [taught]]):
            prepared.prepared(LeasedBatch(number, groups, [None] * len(groups)))
    (told,) = (entry for entry in logs if entry["event"] == "fields.unused")
    assert told["fields"] == ["distill_logprobs"]
