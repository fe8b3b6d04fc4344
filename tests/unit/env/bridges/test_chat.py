from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grpo_env.bridges.chat import Chat, LimitReached, RequestUnusable, plain_message
from grpo_env.tasks import Answer, ContextFull
from tests.unit.env.bridges.scripted import ScriptedDialogue

QUESTION = {"role": "user", "content": "What is 2+3?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


async def test_answers_that_come_back_parsed_continue_with_their_exact_text() -> None:
    dialogue = ScriptedDialogue(CALL, "5")
    chat = Chat(dialogue)

    first = await chat.complete([QUESTION], [ADD])
    (call,) = first.tool_calls
    assert (first.content, first.finish_reason) == ("I add.", "tool_calls")
    assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert first.completion_tokens == len(CALL)

    sent_back = {"role": "assistant", "content": first.content, "tool_calls": first.tool_calls}
    result = {"role": "tool", "content": "5", "tool_call_id": call["id"]}
    last = await chat.complete([QUESTION, sent_back, result], [ADD])
    assert dialogue.requests[1] == [
        QUESTION,
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "5"},
    ]
    assert (last.content, last.tool_calls, last.finish_reason) == ("5", [], "stop")
    assert last.completion_tokens == 1


async def test_an_answer_that_the_environment_changed_is_not_taken_for_the_policys() -> None:
    dialogue = ScriptedDialogue(CALL, "5")
    chat = Chat(dialogue)
    first = await chat.complete([QUESTION], [ADD])

    changed = {"role": "assistant", "content": "I multiply.", "tool_calls": first.tool_calls}
    await chat.complete([QUESTION, changed], [ADD])
    assert dialogue.requests[1][1] == {
        "role": "assistant",
        "content": "I multiply.",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
        ],
    }


async def test_several_calls_of_one_answer_get_ids_of_their_own() -> None:
    chat = Chat(ScriptedDialogue(CALL + CALL, CALL))
    ids = [
        call["id"]
        for answer in (
            await chat.complete([QUESTION], [ADD]),
            await chat.complete([QUESTION], [ADD]),
        )
        for call in answer.tool_calls
    ]
    assert ids == ["call_1", "call_2", "call_3"]


NO_CALLS = ('{"arguments": {}}</tool_call>', "[1]</tool_call>", "{add 2 and 3}</tool_call>", "")


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        *((f"<tool_call>{text}", [ADD]) for text in NO_CALLS),
        (CALL + "<tool_call>{</tool_call>", [ADD]),
        (CALL, []),  # without tools nothing is a call
    ],
)
async def test_text_that_is_no_valid_call_is_content(text: str, tools: list[Any]) -> None:
    answer = await Chat(ScriptedDialogue(text)).complete([QUESTION], tools)
    assert (answer.content, answer.tool_calls, answer.finish_reason) == (text, [], "stop")


async def test_limits_and_stop_texts_of_a_request_reach_the_dialogue() -> None:
    dialogue = ScriptedDialogue("1", "2", "3", cut_off=True)
    chat = Chat(dialogue)
    for sampling in ({"max_tokens": 7, "stop": "\n"}, {"max_completion_tokens": 8}, {}):
        answer = await chat.complete([QUESTION], sampling={**sampling, "temperature": 0.1})
        assert answer.finish_reason == "length"
    reached = [(options["max_tokens"], options["stop"]) for options in dialogue.options]
    assert reached == [(7, ("\n",)), (8, ()), (None, ())]


async def test_a_prompt_that_is_too_long_is_told_from_a_conversation_that_became_too_long() -> None:
    silent, talked = Chat(ScriptedDialogue()), Chat(ScriptedDialogue("5"))
    await talked.complete([QUESTION])
    for chat in (silent, talked):
        with pytest.raises(ContextFull):
            await chat.complete([QUESTION])
    talked.finish()
    with pytest.raises(ContextFull, match="513 tokens"):
        silent.finish()


def calling(arguments: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        *((calling(text), calling(text)) for text in ("{bad", "[" * 5000)),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "content": "7", "reasoning": "3, 4", "thinking": None},
            {"role": "assistant", "content": "7", "reasoning": "3, 4"},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
            {"role": "user", "content": "a\nb"},
        ),
        (
            {"role": "tool", "content": "5", "tool_call_id": "call_1", "name": "add"},
            {"role": "tool", "content": "5", "name": "add"},
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "2"}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": 2}}],
            },
        ),
        ({"role": "user", "content": "a", "tool_calls": None}, {"role": "user", "content": "a"}),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
    ],
)
def test_messages_in_the_form_of_chat_templates(message: Any, plain: Any) -> None:
    assert plain_message(message) == plain


@pytest.mark.parametrize("kind", ["image_url", "input_audio"])
def test_images_and_sounds_are_refused_by_name(kind: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {}}]
    with pytest.raises(RequestUnusable, match=f"user message has a part of the type '{kind}'"):
        plain_message({"role": "user", "content": content})


async def test_limits_end_a_rollout_with_what_was_said() -> None:
    dialogue = ScriptedDialogue("four", "56", "7")
    chat = Chat(dialogue, calls=3, tokens=6)
    await chat.complete([QUESTION], sampling={"max_tokens": 5})
    await chat.complete([QUESTION], sampling={"max_tokens": 5})
    assert [options["max_tokens"] for options in dialogue.options] == [5, 2]
    assert not chat.is_cut_off
    for problem in ("its 6 tokens", "its 3 calls"):
        with pytest.raises(LimitReached, match=problem):
            await chat.complete([QUESTION])
    assert chat.is_cut_off
    chat.finish()
    assert chat.last == "56"


async def test_a_refusal_counts_until_a_later_call_is_answered() -> None:
    class Short(ScriptedDialogue):
        async def say(self, messages: Any, *args: Any, **how: Any) -> Answer:
            if messages[0]["content"] == "long":
                raise ContextFull("no room")
            return await super().say(messages, *args, **how)

    chat = Chat(Short("5", "6", delay_s=0.01))
    begun = asyncio.create_task(chat.complete([QUESTION]))
    await asyncio.sleep(0)
    with pytest.raises(ContextFull):
        await chat.complete([{"role": "user", "content": "long"}])
    await begun
    assert chat.is_cut_off
    await chat.complete([QUESTION])
    assert not chat.is_cut_off


async def test_calls_side_by_side_share_the_tokens_of_a_rollout() -> None:
    dialogue = ScriptedDialogue("four", "5", "more", delay_s=0.01)
    chat = Chat(dialogue, tokens=5)
    calls = (chat.complete([QUESTION]) for _ in range(3))
    *_, refused = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(refused, LimitReached)
    assert [options["max_tokens"] for options in dialogue.options] == [5, 1]


async def test_a_rollout_that_ends_ends_its_calls() -> None:
    chat = Chat(ScriptedDialogue("late", delay_s=60.0))
    call = asyncio.create_task(chat.complete([QUESTION]))
    await asyncio.sleep(0)
    await chat.close()
    assert call.cancelled()
    with pytest.raises(RequestUnusable, match="the rollout has ended"):
        await chat.complete([QUESTION])
    assert chat.last is None
