"""The records of a scored group, the text of a conversation, and files of records: whole or absent,
a bounded number of them, and damage named with its place."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_core.errors import BrokenRollouts
from grpo_core.rollouts.files import (
    file_of_step,
    read_step,
    read_steps,
    remove_later_steps,
    steps_in,
    write_step,
)
from grpo_core.rollouts.record import (
    records_of_group,
    split_conversation,
    text_of,
    trained_runs,
)
from grpo_core.wire.scored_group import ScoredGroup
from tests.support.conversations import record
from tests.support.directories import files_of_at_most, names

SAID = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
GROUP: dict[str, Any] = {
    "tokens": [[5, 6, 7], [5, 6, 8, 9, 10]],
    "masks": [[-100, -100, 7], [-100, -100, 8, -100, 10]],
    "scores": [1.0, 0.25],
}


def records(**changes: Any) -> list[Any]:
    return records_of_group(4, 2, ScoredGroup.model_validate(GROUP | changes))


def test_everything_that_an_environment_sends_of_a_sequence() -> None:
    _, found = records(
        env_id=3,
        inference_logprobs=[[1, 1, -0.1], [1, 1, -0.2, 1, -0.4]],
        advantages=[[0.0], [0.0, 0.0, 1.0, 7.0, 2.0]],
        distill_token_ids=[[[]] * 3, [[], [6], [8, 1], [9], [3]]],
        distill_logprobs=[[[]] * 3, [[], [-9.0], [-0.3, -7.0], [-5.0], [-6.0]]],
        messages=[SAID, SAID],
        generation_params={"temperature": 0.5},
        overrides=[
            {},
            {
                **{"reward_parts": {"accuracy": 1, "format": -0.5}, "grade_reason": "no unit"},
                **{"finish_reason": "length", "temperature": 0.75},
            },
        ],
        group_overrides={
            **{"task": "gsm8k", "item": "ab12"},
            "policy_version": [[[1, 2], [1, 2]], [[1, 2], [1, 3]]],
        },
    )
    assert found == record(
        **{"step": 4, "group": 2, "index": 1, "env_id": 3, "task": "gsm8k", "item": "ab12"},
        **{"messages": SAID, "tokens": [5, 6, 8, 9, 10], "mask": [0, 0, 1, 0, 1]},
        **{"behaviour_logprobs": [-0.2, -0.4], "logprobs": None, "score": 0.25},
        **{"parts": {"accuracy": 1.0, "format": -0.5}, "reason": "no unit", "advantage": 1.5},
        **{"versions": [[1, 2], [1, 3]], "staleness": None, "finish_reason": "length"},
        **{"temperature": 0.75, "completion_tokens": 2, "teacher_logprobs": [-0.3, None]},
    )


def test_a_bare_group_and_keys_with_a_foreign_meaning() -> None:
    foreign = {"reward_parts": ["x"], "grade_reason": 3, "finish_reason": None}
    partly = {"reward_parts": {"a": 1, "b": "x", "c": True}}
    for found in (
        records()[0],
        records(overrides=[foreign] * 2, group_overrides={"task": 1, "policy_version": [1]})[0],
    ):
        assert found == record(
            **{"step": 4, "group": 2, "env_id": None, "task": None, "item": None},
            **{"messages": [], "tokens": [5, 6, 7], "mask": [0, 0, 1], "behaviour_logprobs": []},
            **{"logprobs": None, "parts": {}, "reason": None, "advantage": None},
            **{"versions": None, "staleness": None, "finish_reason": None},
            **{"completion_tokens": 1},
        )
    assert records(overrides=[partly] * 2)[0].parts == {"a": 1.0}


def test_sequences_of_one_rollout_are_numbered() -> None:
    def parts(*rollouts: int) -> list[Any]:
        overrides = [{"rollout_index": rollout} for rollout in rollouts]
        return [one.part for one in records(overrides=overrides)]

    assert parts(3, 3) == [[1, 2], [2, 2]]
    assert parts(0, 1) == [None, None]


@pytest.mark.parametrize(
    ("roles", "mask", "prompt"),
    [
        ("user assistant", [0, 1], 1),
        ("system user assistant user assistant", [0, 0, 1, 1], 4),  # an example in the prompt
        ("user assistant tool assistant", [0, 1, 0, 1], 1),  # two turns
        ("user assistant", [0, 0], 1),  # all of it was cut off
        ("user", [0, 1], 1),
        ("", [0, 1], 0),
    ],
)
def test_the_completion_begins_with_the_policys_first_turn(
    roles: str, mask: list[int], prompt: int
) -> None:
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles.split())]
    first, rest = split_conversation(record(messages=messages, mask=mask))
    assert (first, rest) == (messages[:prompt], messages[prompt:])
    assert trained_runs([1, 1, 0, 1]) == 2


def test_text_of_messages() -> None:
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert text_of(SAID[:1]) == "q"
    assert text_of([SAID[0], call]) == 'user: q\nassistant: tool_calls: [{"name": "add"}]'
    assert text_of([{"role": "user", "content": [{"type": "text"}]}]) == '[{"type": "text"}]'


UNKNOWN = {
    **{"env_id": None, "task": None, "item": None, "logprobs": None, "reason": None},
    **{"advantage": None, "versions": None, "staleness": None, "finish_reason": None},
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    full = [record(), record(index=1, messages=[{"role": "user", "content": "é\n", "name": "x"}])]
    bare = [record(step=2, messages=[], parts={}, **UNKNOWN)]
    write_step(tmp_path / "new", 2, bare)
    write_step(tmp_path / "new", 1, full)
    assert list(read_steps(tmp_path / "new")) == full + bare
    assert list(read_steps(tmp_path / "new", steps={2, 9})) == bare


def test_a_step_written_again_replaces_its_file_and_the_oldest_steps_go(tmp_path: Path) -> None:
    for step in (9, 10, 11, 10, 1_000_000):
        write_step(tmp_path, step, [record(step=step)], keep=3)
    (tmp_path / "tokenizer.json").touch()
    assert steps_in(tmp_path) == [10, 11, 1_000_000]
    assert len(list(read_steps(tmp_path))) == 3
    remove_later_steps(tmp_path, last=10)
    assert names(tmp_path) == ["step-000010.jsonl.gz", "tokenizer.json"]


def test_a_failed_write_leaves_the_earlier_file_whole(tmp_path: Path) -> None:
    write_step(tmp_path, 1, [record()])
    long = [record(tokens=[i * 7919 % 50000 for i in range(5000)], mask=[0] * 5000)]
    with files_of_at_most(4096), pytest.raises(OSError, match="File too large"):
        write_step(tmp_path, 1, long)
    assert list(read_steps(tmp_path)) == [record()]
    remove_later_steps(tmp_path, last=1)
    assert names(tmp_path) == ["step-000001.jsonl.gz"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda whole: whole[:-9], "line 2: Compressed file ended"),
        (lambda whole: b"text" + whole, "line 1: Not a gzipped file"),
        (lambda whole: whole[:30] + b"\xff\xff" + whole[32:], "line 1: "),
        (lambda whole: gzip.compress(gzip.decompress(whole) + b"{}\n"), "line 2: step: Field req"),
        (lambda whole: gzip.compress(gzip.decompress(whole) + b"{"), "line 2: value: Invalid JSON"),
        (
            lambda whole: gzip.compress(
                gzip.decompress(whole).replace(b'"tokens":[', b'"tokens":[-1,')
            ),
            "line 1: tokens.0: Input should be greater than or equal to 0",
        ),
    ],
    ids=["cut off", "no gzip", "changed bytes", "no record", "no JSON", "no token"],
)
def test_damage_is_named_with_file_and_line(
    damage: Callable[[bytes], bytes], told: str, tmp_path: Path
) -> None:
    write_step(tmp_path, 7, [record()])
    path = file_of_step(tmp_path, 7)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BrokenRollouts) as error:
        list(read_steps(tmp_path))
    assert str(error.value).startswith(f"{path}, {told}")
    assert "remove this file" in str(error.value)


def test_a_missing_directory_and_a_missing_step_are_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenRollouts, match=r"nowhere cannot be read: No such file"):
        steps_in(tmp_path / "nowhere")
    with pytest.raises(BrokenRollouts, match=r"step-000003\.jsonl\.gz, line 1: .*No such file"):
        list(read_step(tmp_path, 3))
