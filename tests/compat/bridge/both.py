"""Checks for every version of verifiers: turns, tools, and conversations as sampled tokens.

Also a plugin for the checks of one version, whose environments it makes importable.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from grpo_env.bridges.verifiers import VerifiersTask
from grpo_env.loading import verifiers_task
from grpo_env.rollout.chat_template import load_template
from grpo_env.tasks import Graded, TaskOptions
from tests.unit.env.bridges.scripted import ScriptedDialogue
from tests.unit.env.rollout.rig import PLAN, engine_on, item_of
from tests.unit.env.rollout.test_conversation import SAID, scripted

IS_CLASSIC = version("verifiers") < "0.4"
ENVIRONMENTS = "classic_environments" if IS_CLASSIC else "current_environments"
TOOL = "add" if IS_CLASSIC else "calculator_add"
CALL = f'I add. <tool_call>{{"name": "{TOOL}", "arguments": {{"a": 1, "b": 1}}}}</tool_call>'
SUM = 4
"""Row of the calculator's 1+1."""


@pytest.fixture(autouse=True)
def _environments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    directory = Path(__file__).parent / ENVIRONMENTS
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=":")  # for the calculator's process
    yield
    for name in ("one_digit_sums", "calculator", "made"):
        sys.modules.pop(name, None)


def row_of(task: VerifiersTask, index: int = 0) -> Any:
    rows = task.rows("train")
    assert rows is not None
    return rows[index]


async def test_one_turn() -> None:
    largest = {"largest": 3}
    arguments = largest if IS_CLASSIC else {"taskset": largest}
    task = verifiers_task("one-digit-sums", TaskOptions(args=arguments))
    rows = task.rows("train")
    assert rows is not None
    assert (len(rows), rows[6]["answer"], task.rows("test")) == (16, "3", None)
    opening = [
        {"role": "system", "content": "Answer with the number."},
        {"role": "user", "content": "1+2="},
    ]
    assert task.prompt(rows[6]) == opening
    reason = "max_turns_reached" if IS_CLASSIC else "agent_completed"
    # 1.0 for the result and 0.25 for a short answer
    for text, part, score in (("3", 1.0, 1.25), ("thirteen", 0.0, 0.0)):
        own = {"num_turns": 1.0} if IS_CLASSIC else {"characters": float(len(text))}
        dialogue = ScriptedDialogue(text)
        parts = {"correct": part, "is_short": part, **own}
        assert await task.run(rows[6], dialogue) == Graded(parts, reason, score)
        assert dialogue.requests == [opening]
    task.close()


async def test_a_tool_conversation_repeats_what_the_policy_said_to_the_letter() -> None:
    task = verifiers_task("calculator", TaskOptions())
    dialogue = ScriptedDialogue(CALL, "2")
    graded = await task.run(row_of(task, SUM), dialogue)
    classic = {"num_turns": 2.0, "total_tool_calls": 1.0, "add_calls": 1.0}
    assert graded.parts == {"correct": 1.0, **(classic if IS_CLASSIC else {"results": 1.0})}
    assert graded.score == 1.0
    question = {"role": "user", "content": "What is 1+1?"}
    assert dialogue.requests == [
        [question],
        [question, {"role": "assistant", "content": CALL}, {"role": "tool", "content": "2"}],
    ]
    (schema,) = dialogue.options[0]["tools"]
    assert schema["function"]["name"] == TOOL
    assert not IS_CLASSIC or [*task.tools] == [schema]
    # A conversation that becomes too long is rated as far as it went.
    cut = ScriptedDialogue(CALL)
    too_long = await task.run(row_of(task, SUM), cut)
    assert not cut.last_answer.finished
    if IS_CLASSIC:
        assert (too_long.reason, too_long.parts["num_turns"]) == ("prompt_too_long", 1.0)
    else:
        assert too_long.parts == {"correct": 0.0, "results": 0.0}
    task.close()


@pytest.mark.full
async def test_a_tool_conversation_is_one_sequence_with_the_very_tokens_that_were_sampled(
    tokenizer_dir: Path,
) -> None:
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer_dir).encode
    prompt = encode(f"{TOOL}\n<|im_start|>user\nWhat is 0+0?<|im_end|>\n<|im_start|>assistant\n")
    between = encode("\n<|im_start|>tool\n0<|im_end|>\n<|im_start|>assistant\n")
    task = verifiers_task("calculator", TaskOptions())
    plan = replace(PLAN, group_size=1, drop_equal_scores=False, max_token_length=400)
    call = CALL.removeprefix("I add. ").replace("1", "0")

    template = load_template(str(tokenizer_dir))
    async with engine_on(scripted(call, "0"), template) as (engine, _):
        outcome = await engine.roll_out(item_of(task), plan)
    task.close()

    assert outcome.group is not None
    group = outcome.group
    assert group.tokens == [prompt + SAID + between + SAID]
    masked, unmasked = [-100] * len(prompt), [-100] * len(between)
    assert group.masks == [masked + SAID + unmasked + SAID]
    assert group.scores == [1.0]
    assert group.messages is not None
    roles = ["user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in group.messages[0]] == roles
