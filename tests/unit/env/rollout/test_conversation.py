"""Conversations: token-exact continuation, masks, several sequences, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_core.wire.receipt import RECEIPT, distribution, receipts_of
from grpo_env.rollout.chat_template import ChatTemplate, load_template
from grpo_env.rollout.groups import FailureReason, GroupLost
from grpo_env.tasks import Answer, Dialogue, Graded, Message, Row, State
from tests.support.canned import generate_answer
from tests.support.http_stub import Answer as HttpAnswer
from tests.unit.env.feeding import Rewarded
from tests.unit.env.rollout import rig
from tests.unit.env.rollout.rig import (
    PLAN,
    item_of,
    lost,
    prompts,
    submitted,
)

END = 257  # <|im_end|> of the tokenizer
ONE = replace(PLAN, group_size=1, drop_equal_scores=False, max_token_length=400)
SAID = [300, 301, END]
"""No tokenizer would make these ids of the text "3+4": only what was sampled may come back."""


class Talk(Rewarded):
    """Answers every message of the model with `next_messages`."""

    def __init__(self, next_messages: Callable[[State, Answer], Any], **how: Any) -> None:
        super().__init__(lambda answer, _row: float(answer == "7"), **how)
        self._next_messages = next_messages

    async def step(self, state: State, message: Answer) -> Sequence[Message] | None:
        found: Sequence[Message] | None = self._next_messages(state, message)
        return found


def twice(state: State, message: Answer) -> list[Message] | None:
    assert message == "3+4"
    return [{"role": "tool", "content": "7"}] if state.turn == 1 else None


def scripted(*texts: str, ids: Sequence[int] = SAID, finish: str = "stop") -> Any:
    """Each request gets the next text, with the same token ids and their receipt."""
    left = iter(texts)

    def generate(body: dict[str, Any]) -> HttpAnswer:
        text = next(left, texts[-1])
        prompt_ids = body["prompt"]["prompt_token_ids"]
        sampled = ids, [-0.25] * len(ids), [[1, 0], [1, 1]]
        answer = generate_answer(
            [text],
            prompt_token_ids=prompt_ids,
            token_ids=[list(ids)],
            receipts=receipts_of(prompt_ids, [sampled], distribution(body["temperature"], {})),
            logprobs=[[[{str(token): -0.25}] for token in ids]],
            finish_reasons=[finish],
        )
        return 200, answer

    return generate


@pytest.fixture
def template(tokenizer_dir: Path) -> ChatTemplate:
    return load_template(str(tokenizer_dir))


@pytest.fixture
def sample(template: ChatTemplate) -> Any:
    """`rig.sample` with this template."""
    return partial(rig.sample, template=template)


async def test_the_second_turn_continues_the_very_tokens_that_were_sampled(
    sample: Any, tokenizer_dir: Path
) -> None:
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer_dir).encode
    prompt = encode("<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n")
    between = encode("\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")

    outcome, server = await sample(scripted("3+4", "3+4"), Talk(twice), ONE)

    assert server.bodies("POST /generate")[0]["n"] == 1
    assert prompts(server) == [prompt, prompt + SAID + between]
    group = submitted(outcome)
    assert group.tokens == [prompt + SAID + between + SAID]
    masked, unmasked = [-100] * len(prompt), [-100] * len(between)
    assert group.masks == [masked + SAID + unmasked + SAID]
    assert group.inference_logprobs == [
        [1.0] * len(prompt) + [-0.25] * 3 + [1.0] * len(between) + [-0.25] * 3
    ]
    assert group.messages is not None
    assert [m["role"] for m in group.messages[0]] == ["user", "assistant", "tool", "assistant"]
    assert group.generation_params == {"temperature": 0.7}
    assert outcome.completion_tokens == 6


async def test_a_sequence_without_a_receipt_of_each_answer_has_none(sample: Any) -> None:
    answer, requests = scripted("3+4"), []

    def generate(body: dict[str, Any]) -> HttpAnswer:
        status, found = answer(body)
        requests.append(body)
        return status, found | ({"receipts": None} if len(requests) == 2 else {})

    outcome, _ = await sample(generate, Talk(twice), ONE)
    assert [RECEIPT in override for override in submitted(outcome).overrides or ()] == [False]


async def test_an_answer_that_ends_in_another_token_gets_the_whole_end_of_the_turn(
    sample: Any,
) -> None:
    _, server = await sample(scripted("3+4", ids=[300, 301]), Talk(twice), ONE)
    first, second = prompts(server)
    assert second[len(first) : len(first) + 3] == [300, 301, END]


async def test_an_answer_that_was_cut_off_and_the_last_turn_end_the_conversation(
    sample: Any,
) -> None:
    endless = Talk(lambda _state, _message: [{"role": "user", "content": "go on"}])
    endless.max_turns = 3
    _, cut = await sample(scripted("3", finish="length"), endless, ONE)
    _, whole = await sample(scripted("3"), endless, ONE)
    assert len(cut.bodies("POST /generate")) == 1
    assert len(whole.bodies("POST /generate")) == 3


async def test_a_full_context_ends_the_conversation_with_what_was_said(sample: Any) -> None:
    endless = Talk(lambda _state, _message: [{"role": "user", "content": "x" * 100}])
    seen: list[Answer] = []
    endless.reward = lambda answer, _row: seen.append(answer) or 1.0  # type: ignore[method-assign]
    outcome, server = await sample(scripted("3"), endless, replace(ONE, max_token_length=140))
    assert len(server.bodies("POST /generate")) == 1
    assert [(answer.finished, len(answer.messages)) for answer in seen] == [(False, 2)]
    submitted(outcome)


async def test_a_step_that_fails_is_a_failed_rollout(sample: Any) -> None:
    outcome, _ = await sample(scripted("3"), Talk(lambda _state, _message: {}["x"]), PLAN)
    found = lost(outcome)
    assert (found.reason, found.detail) == (
        FailureReason.FAILED_ROLLOUT,
        "training row 1: KeyError: 'x'",
    )


def starting_again(state: State, _message: Answer) -> list[Message] | None:
    """The second turn knows nothing of the first one; only odd rollouts have one."""
    if state.turn > 1 or state.row.get("short"):
        return None
    state.messages = []
    return [{"role": "user", "content": "again"}]


async def test_a_conversation_that_is_replaced_makes_a_second_sequence(sample: Any) -> None:
    task = Talk(starting_again)
    found = lost((await sample(scripted("7"), task, ONE))[0])
    assert found.reason is FailureReason.FAILED_ROLLOUT
    assert "has 2 sequences, and the limit is 1; set max_sequences of the task" in found.detail

    outcome, _ = await sample(scripted("7"), task, replace(ONE, max_sequences=3))

    group = submitted(outcome)
    assert group.size == 3
    assert group.scores == [1.0] * 3
    assert group.overrides
    assert [o["rollout_index"] for o in group.overrides] == [0, 0, 0]
    assert [o["finish_reason"] for o in group.overrides] == ["stop", "stop", "padding"]
    # Padding fills the group up to its size; nothing of it is trained on.
    assert group.masks[2] == [-100, -100]
    assert group.tokens[2] == group.tokens[0][:2]
    assert group.messages
    assert [len(conversation) for conversation in group.messages] == [2, 2, 0]


QUESTION: Message = {"role": "user", "content": "3+4="}
SURE: Message = {"role": "user", "content": "sure?"}


class SelfDriven(Rewarded):
    """Conducts its own rollout, as a bridge to another library does."""

    drives_itself = True

    def __init__(self) -> None:
        super().__init__(lambda _answer, _row: 0.0)

    async def run(self, _row: Row, dialogue: Dialogue) -> Any:
        first = await dialogue.say([QUESTION], max_tokens=5, stop=["."])
        said: Message = {"role": "assistant", "content": str(first)}
        counted = dialogue.count([QUESTION, said, SURE])
        last = await dialogue.say([QUESTION, said, SURE])
        assert counted == last.context_tokens
        return {"accuracy": float(last == "8"), "turns": 2.0}


async def test_a_task_may_conduct_the_rollout_itself(sample: Any) -> None:
    outcome, server = await sample(scripted("7", "8"), SelfDriven(), ONE, weights={"turns": 0.0})
    assert [(g.score, g.parts) for g in outcome.grades] == [(1.0, {"accuracy": 1.0, "turns": 2.0})]
    asked, _ = server.bodies("POST /generate")
    assert (asked["max_tokens"], asked["stop"]) == (5, ["."])
    first, second = prompts(server)
    assert second[: len(first) + 3] == first + SAID
    assert submitted(outcome).size == 1


class AsksItself(SelfDriven):
    async def run(self, _row: Row, dialogue: Dialogue) -> float:
        answer = await dialogue.say([QUESTION])
        await dialogue.say([{"role": "user", "content": answer}])
        return 1.0


async def test_an_answer_that_is_passed_on_is_sent_as_its_text(sample: Any) -> None:
    plan = replace(ONE, max_sequences=2)
    outcome, _ = await sample(scripted("7", "8"), AsksItself(), plan)
    sent = json.loads(submitted(outcome).model_dump_json())
    assert [m["content"] for m in sent["messages"][-1]] == ["7", "8"]


class Prefilled(SelfDriven):
    """Begins the policy's answer, and goes on with the messages as a chat client sends them."""

    async def run(self, _row: Row, dialogue: Dialogue) -> float:
        begun: list[Message] = [QUESTION, {"role": "assistant", "content": "Sure: "}]
        first = await dialogue.say(begun)
        assert first.messages[1:] == [{"role": "assistant", "content": "Sure: 7"}]
        last = await dialogue.say([*begun, {"role": "assistant", "content": "7"}, SURE])
        assert (first.opening, last.opening) == ("Sure: ", "")
        return 1.0


async def test_an_answer_that_the_prompt_began_is_continued_in_one_sequence(
    sample: Any, template: ChatTemplate
) -> None:
    outcome, server = await sample(scripted("7", "8"), Prefilled(), ONE)
    assert submitted(outcome).size == 1
    first, second = prompts(server)
    assert template.tokenizer.decode(first).endswith("Sure: ")
    assert second[: len(first) + 3] == first + SAID


class Branching(SelfDriven):
    """Asks the same question twice at the same time, then goes on with the first answer."""

    async def run(self, _row: Row, dialogue: Dialogue) -> float:
        first, _ = await asyncio.gather(dialogue.say([QUESTION]), dialogue.say([QUESTION]))
        await dialogue.say([*first.messages, SURE])
        return 1.0


async def test_equal_requests_at_the_same_time_are_sequences_of_their_own(sample: Any) -> None:
    plan = replace(ONE, max_sequences=2)
    outcome, server = await sample(scripted("7", "8"), Branching(), plan)
    group = submitted(outcome)
    prompt, *_ = prompts(server)
    longer, shorter = group.tokens
    assert shorter == prompt + SAID
    assert longer[: len(shorter)] == shorter
    assert [mask.count(SAID[0]) for mask in group.masks] == [2, 1]


class Overtaken(SelfDriven):
    """The answer to its second call comes first. The last one, to the first call, is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.second_is_answered = threading.Event()

    async def run(self, _row: Row, dialogue: Dialogue) -> float:
        first = asyncio.create_task(dialogue.say([QUESTION]))
        await asyncio.sleep(0)  # it is begun
        await dialogue.say([SURE])
        self.second_is_answered.set()
        await first
        dialogue.cut_off()
        return 1.0


async def test_sequences_are_in_the_order_of_their_calls_whichever_answer_comes_first(
    sample: Any, template: ChatTemplate
) -> None:
    task = Overtaken()
    first, second = (template.prompt_ids([message]) for message in (QUESTION, SURE))
    answer = scripted("7")

    def generate(body: dict[str, Any]) -> HttpAnswer:
        if body["prompt"]["prompt_token_ids"] == first:
            task.second_is_answered.wait()
        found: HttpAnswer = answer(body)
        return found

    outcome, _ = await sample(generate, task, replace(ONE, max_sequences=2))
    group = submitted(outcome)
    assert group.tokens == [first + SAID, second + SAID]
    assert group.overrides
    assert [override["finish_reason"] for override in group.overrides] == ["length", "stop"]


class Rewriting(SelfDriven):
    """Goes on from the first answer in two ways, changes that answer, and takes other tools."""

    async def run(self, _row: Row, dialogue: Dialogue) -> float:
        first = await dialogue.say([QUESTION])
        await dialogue.say([*first.messages, SURE])
        await dialogue.say([*first.messages, QUESTION])
        await dialogue.say([QUESTION, {"role": "assistant", "content": "eight"}, SURE])
        await dialogue.say([*first.messages, SURE], tools=[{"function": {"name": "add"}}])
        return 1.0


async def test_what_a_rollout_rewrites_is_kept_and_repeats_the_tokens_before_it(
    sample: Any, template: ChatTemplate
) -> None:
    plan = replace(ONE, max_sequences=4)
    outcome, server = await sample(scripted("7", "8", "9", "10", "11"), Rewriting(), plan)
    prompt, second, third, changed, with_tools = prompts(server)
    again = template.tokenizer.encode("\n<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n")
    # The tokens of the first answer are none that a tokenizer makes of its text.
    assert third == prompt + SAID + again
    assert SAID[0] not in changed + with_tools
    group = submitted(outcome)
    assert group.tokens == [one + SAID for one in (second, third, changed, with_tools)]
    # Other projects' environments borrow from this module, without the trainer.
    importlib.import_module("grpo_trainer.data.receipts").check_receipts(0, group)
    assert group.overrides
    assert [len(o[RECEIPT]["completions"]) for o in group.overrides] == [2, 1, 1, 1]
    # The first answer is trained once, in the sequence that it began.
    assert [mask.count(SAID[0]) for mask in group.masks] == [2, 1, 1, 1]
    assert group.messages
    assert [m["content"] for m in group.messages[1]] == ["3+4=", "7", "3+4=", "9"]


class Undaunted(SelfDriven):
    """Asks again after a refusal."""

    async def run(self, _row: Row, dialogue: Dialogue) -> float:
        first = await dialogue.say([QUESTION])
        for _ in range(2):
            with contextlib.suppress(GroupLost):
                await dialogue.say([*first.messages, SURE])
        return 1.0


async def test_an_answer_that_never_came_leaves_no_trace(sample: Any) -> None:
    answers = iter([scripted("7"), lambda _: (400, {"error": "no"}), scripted("8")])
    outcome, server = await sample(lambda body: next(answers)(body), Undaunted(), ONE)
    _, refused, repeated = prompts(server)
    assert refused == repeated
    assert submitted(outcome).tokens == [repeated + SAID]


class Ranked(SelfDriven):
    """Only the first rollout of a group gets a reward."""

    rates_groups = True

    async def run_group(self, _row: Row, dialogues: Sequence[Dialogue]) -> list[Graded]:
        # In another order than that of the rollouts
        answers = {i: await dialogues[i].say([QUESTION]) for i in (1, 0)}
        return [Graded({"rank": i}, score=float(i == 0)) for i in range(len(answers))]


async def test_a_task_may_rate_the_rollouts_of_a_group_together(sample: Any) -> None:
    plan = replace(ONE, group_size=2)
    outcome, _ = await sample(scripted("said second", "said first"), Ranked(), plan)
    group = submitted(outcome)
    assert [grade.score for grade in outcome.grades] == [1.0, 0.0]
    assert group.messages
    assert [m[-1]["content"] for m in group.messages] == ["said first", "said second"]

    # A score of the task contains its parts; weights of the user add to it.
    weighted, _ = await sample(scripted("7"), Ranked(), plan, weights={"rank": 0.5})
    assert [grade.score for grade in weighted.grades] == [1.0, 0.5]


async def test_a_text_is_continued_without_template(sample: Any) -> None:
    task = Rewarded(lambda _answer, _row: 1.0)
    task.prompt = lambda row: row["prompt"]  # type: ignore[method-assign]
    assert item_of(task).messages == [{"role": "user", "content": "3+4="}]
    _, server = await sample(scripted("7"), task, ONE)
    assert len(prompts(server)[0]) == len("3+4=")
