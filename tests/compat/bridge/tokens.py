"""A check for every version of verifiers: its conversations with the real rollout engine."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from grpo_env.bridges.verifiers import verifiers_task
from grpo_env.rollout.chat_template import load_template
from grpo_env.tasks import TaskOptions
from tests.unit.env.rollout.rig import PLAN, engine_on, item_of
from tests.unit.env.rollout.test_conversation import SAID, scripted

IS_CLASSIC = version("verifiers") < "0.4"
ENVIRONMENTS = "classic_environments" if IS_CLASSIC else "current_environments"
TOOL = "add" if IS_CLASSIC else "calculator_add"
CALL = f'<tool_call>{{"name": "{TOOL}", "arguments": {{"a": 0, "b": 0}}}}</tool_call>'


async def test_a_tool_conversation_is_one_sequence_with_the_very_tokens_that_were_sampled(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    directory = Path(__file__).parent / ENVIRONMENTS
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=":")  # for the calculator's process
    encode = AutoTokenizer.from_pretrained(tokenizer_dir).encode
    prompt = encode("<|im_start|>user\nWhat is 0+0?<|im_end|>\n<|im_start|>assistant\n")
    between = encode("\n<|im_start|>tool\n0<|im_end|>\n<|im_start|>assistant\n")
    task = verifiers_task("calculator", TaskOptions())
    plan = replace(PLAN, group_size=1, drop_equal_scores=False, max_token_length=400)

    template = load_template(str(tokenizer_dir))
    async with engine_on(scripted(CALL, "0"), template) as (engine, _):
        outcome = await engine.roll_out(item_of(task), plan)
    task.close()

    assert outcome.group is not None
    group = outcome.group
    assert group.tokens == [prompt + SAID + between + SAID]
    masked, unmasked = [-100] * len(prompt), [-100] * len(between)
    assert group.masks == [masked + SAID + unmasked + SAID]
    assert group.scores == [1.0]
    assert group.messages is not None
    assert [message["role"] for message in group.messages[0]] == [
        "user", "assistant", "tool", "assistant"
    ]  # fmt: skip
