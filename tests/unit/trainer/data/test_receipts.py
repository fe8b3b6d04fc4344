"""A change between the server's answer and the trainer is named with the field and the place."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from typing import Any

import pytest

from grpo_core.wire.fields import MASKED
from grpo_core.wire.receipt import RECEIPT, distribution, receipts_of
from grpo_core.wire.scored_group import OWN_LOGPROBS, ScoredGroup
from grpo_trainer.data.filter import GroupFilter
from grpo_trainer.data.receipts import check_receipts
from grpo_trainer.data.stats import data_metrics
from grpo_trainer.errors import RolloutMismatch
from tests.unit.trainer.groups import LIMITS, P, filtered

Fields = dict[str, Any]
VERSIONS = [[1, 7], [1, 8]]


def receipted() -> Fields:
    """Two sequences: prompt 5 6 and completion 7; and two turns, 8 9 and 4 after 5 6 8 9 3."""
    sampling = distribution(0.7, {})
    first = receipts_of(
        [5, 6], [([7], [-0.1], VERSIONS), ([8, 9], [-0.2, -0.3], VERSIONS)], sampling
    )
    [last] = receipts_of([5, 6, 8, 9, 3], [([4], [-0.4], VERSIONS)], sampling)
    return {
        "tokens": [[5, 6, 7], [5, 6, 8, 9, 3, 4]],
        "masks": [[MASKED, MASKED, 7], [MASKED, MASKED, 8, 9, MASKED, 4]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[P, P, -0.1], [P, P, -0.2, -0.3, P, -0.4]],
        "generation_params": {"temperature": 0.7},
        "overrides": [
            {RECEIPT: {"score": 1.0, "completions": first[:1]}},
            {RECEIPT: {"score": 0.0, "completions": [first[1], last]}},
        ],
        "group_overrides": {"policy_version": [VERSIONS, VERSIONS]},
    }


def group_of(fields: Fields) -> ScoredGroup:
    return ScoredGroup.model_validate_json(ScoredGroup.model_validate(fields).model_dump_json())


def next_float32(value: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    changed: float = struct.unpack("<f", struct.pack("<I", bits ^ 1))[0]
    return changed


def token(place: int) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        fields["tokens"][1][place] += 1
        if fields["masks"][1][place] != MASKED:
            fields["masks"][1][place] += 1

    return change


def logprob(fields: Fields) -> None:
    fields["inference_logprobs"][1][3] = next_float32(-0.3)


def longer(fields: Fields) -> None:
    fields["tokens"][1].append(9)
    fields["masks"][1].append(9)
    fields["inference_logprobs"][1].append(-0.1)


def shorter(fields: Fields) -> None:
    for name in ("tokens", "masks", "inference_logprobs"):
        fields[name][1].pop()


def trained(fields: Fields) -> None:
    fields["masks"][1][4] = 3
    fields["inference_logprobs"][1][4] = -0.5


def version(fields: Fields) -> None:
    fields["group_overrides"]["policy_version"][1] = [[1, 7], [1, 9]]


def no_version(fields: Fields) -> None:
    del fields["group_overrides"]["policy_version"]


def temperature(fields: Fields) -> None:
    fields["generation_params"]["temperature"] = 0.71


def no_temperature(fields: Fields) -> None:
    del fields["generation_params"]


def truncated(fields: Fields) -> None:
    fields["overrides"][1][RECEIPT]["completions"][1]["sampling"]["top_p"] = 0.9


def score(fields: Fields) -> None:
    fields["scores"][1] = 1.0


def receipt(fields: Fields) -> None:
    fields["overrides"][1][RECEIPT]["completions"][0]["versions"] = None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (token(1), "tokens of the prompt: the first difference is at token 1, which arrived as 7"),
        (token(3), "tokens of the completion: the first difference is at token 3, .* as 10"),
        (token(4), "tokens of the prompt: the first difference is at token 4, which arrived as 4"),
        (logprob, r"inference_logprobs: the first difference is at token 3, .* as -0\.3"),
        (shorter, "tokens of the completion: the first difference is at token 5 .0 of 1 values.;"),
        (longer, "masks: token 6 is trained on, but the server did not sample it"),
        (trained, "masks: token 4 is trained on"),
        (version, r"policy_version: sampled by 1\.7 to 1\.8, and 1\.7 to 1\.9 arrived"),
        (no_version, "and no version arrived"),
        (temperature, r"temperature: sampled with 0\.7, and the group states 0\.71"),
        (no_temperature, r"temperature: sampled with 0\.7, and the group states 1\.0"),
        (truncated, r"top_p: sampled with 0\.9, and the group states None"),
        (score, r"score: the environment gave 0\.0, and 1\.0 arrived"),
        (receipt, "sequence 1 is invalid: completions.0.versions"),
    ],
)
def test_each_field_changed_by_one_unit_is_named_with_its_place(
    change: Callable[[Fields], None], told: str
) -> None:
    fields = copy.deepcopy(receipted())
    check_receipts(3, group_of(fields))
    change(fields)
    with pytest.raises(RolloutMismatch, match=told) as raised:
        check_receipts(3, group_of(fields))
    assert "group 3 of the batch" in str(raised.value)
    assert ("; " in str(raised.value)) == (change is shorter), "only this one changes two fields"


def test_an_altered_group_ends_the_run_even_if_it_could_not_be_trained_on() -> None:
    fields = receipted()
    fields["tokens"][1][3] += 1  # but not its mask
    with pytest.raises(RolloutMismatch, match="token 3"):
        filtered(GroupFilter(LIMITS), [group_of(fields)], step=0)


def test_logprobs_that_the_trainer_computed_are_not_compared() -> None:
    fields = receipted()
    fields["inference_logprobs"][1][3] = -0.7
    fields["group_overrides"][OWN_LOGPROBS] = True
    check_receipts(0, group_of(fields))


def test_the_metric_counts_the_sequences_with_a_receipt() -> None:
    fields = receipted()
    plain = group_of(fields | {"overrides": None})
    check_receipts(0, plain)
    groups = [group_of(fields), plain]
    assert data_metrics(groups, 100)["checks/receipt_fraction"] == 0.5
