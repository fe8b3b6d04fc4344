"""A teacher scores the sampled tokens: which tokens it gets, where its logprobs go, and which
teachers are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from grpo_core.errors import ProtocolViolation, ServiceUnavailable
from grpo_env.pacing import MAX_REFUSED_IN_A_ROW, EveryGroupRefused
from grpo_env.rollout.chat_template import ChatTemplate, load_template
from grpo_env.rollout.groups import FailureReason, GroupLost, SampledGroup
from grpo_env.rollout.producer import GroupProducer
from grpo_env.rollout.teacher import (
    Teacher,
    TeacherClient,
    TeacherTokenizerDiffers,
    TeacherUnavailable,
    TeacherUnusable,
)
from grpo_env.settings import EnvServerSettings
from grpo_env.tasks import Dialogue, Message, Row
from grpo_env.tasks.items import Draw
from tests.support.http_stub import Answer, StubServer, stub_server
from tests.support.wait import DEADLINE_S
from tests.unit.env.feeding import Rewarded, right_and_wrong, sevens
from tests.unit.env.rollout import rig
from tests.unit.env.rollout.rig import PLAN, item_of, lost, submitted
from tests.unit.env.rollout.test_conversation import ONE, SAID, Talk, scripted, twice

NAME = "teacher"
Text = Callable[[int], str]


def scoring(text: Text = str, change: Callable[[dict[str, Any]], Any] = lambda _: None) -> Any:
    """The teacher's logprob of the token at position t is -t - token / 1000. The rows of a request
    are answered in another order.

    Args: change: of the answer
    """

    def complete(body: dict[str, Any]) -> Answer:
        choices = [
            {
                "index": index,
                "logprobs": {
                    "tokens": [text(token) for token in row],
                    "token_logprobs": [None, *(-t - row[t] / 1000 for t in range(1, len(row)))],
                },
            }
            for index, row in enumerate(body["prompt"])
        ]
        answer: dict[str, Any] = {"choices": choices[::-1]}
        change(answer)
        return 200, answer

    return complete


@asynccontextmanager
async def client_of(
    complete: Any, model: str | None = NAME, served: Sequence[str] = (NAME,)
) -> AsyncIterator[tuple[TeacherClient, StubServer]]:
    models = {"data": [{"id": name} for name in served]}
    routes = {"GET /v1/models": lambda _: (200, models), "POST /v1/completions": complete}
    with stub_server(routes) as server:
        async with TeacherClient(f"{server.url}/v1", model, DEADLINE_S, 8, "key") as client:
            yield client, server


@pytest.fixture
def template(tokenizer_dir: Path) -> ChatTemplate:
    return load_template(str(tokenizer_dir))


async def test_the_sampled_tokens_of_a_group_are_scored_in_one_request() -> None:
    canned: Any = SimpleNamespace()
    async with client_of(scoring()) as (client, server):
        outcome, _ = await rig.sample(right_and_wrong, teacher=Teacher(client, canned))
    (asked,) = server.bodies("POST /v1/completions")
    assert asked["prompt"] == [[5, 6, 7, 90, 91], [5, 6, 7, 91, 91]]
    assert (asked["model"], asked["echo"], asked["max_tokens"]) == (NAME, True, 0)
    group = submitted(outcome)
    assert group.distill_token_ids == [[[], [], [], [90], [91]], [[], [], [], [91], [91]]]
    assert group.distill_logprobs == [
        [[], [], [], [-3.09], [-4.091]],
        [[], [], [], [-3.091], [-4.091]],
    ]
    assert group.teacher_logprobs(0) == [None, None, None, -3.09, -4.091]


async def test_groups_that_are_dropped_and_evaluations_ask_no_teacher() -> None:
    equal = Rewarded(lambda _answer, _row: 1.0)
    canned: Any = SimpleNamespace()
    async with client_of(scoring()) as (client, server):
        for task, plan in ((equal, PLAN), (None, replace(PLAN, asks_teacher=False))):
            await rig.sample(right_and_wrong, task, plan, teacher=Teacher(client, canned))
    assert server.bodies("POST /v1/completions") == []


async def test_another_system_prompt_shifts_the_tokens_of_every_turn(
    template: ChatTemplate,
) -> None:
    """The student has no system message; the answer of the tool is the same for both."""
    encode = template.tokenizer.encode
    student = encode("<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n")
    between = encode("\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")
    shown = encode("<|im_start|>system\nAdd.<|im_end|>\n") + student
    async with client_of(scoring()) as (client, server):
        outcome, _ = await rig.sample(
            scripted("3+4", "3+4"),
            Talk(twice),
            ONE,
            template=template,
            teacher=Teacher(client, template, "Add."),
        )
    (asked,) = server.bodies("POST /v1/completions")
    assert asked["prompt"] == [shown + SAID + between + SAID]
    group = submitted(outcome)
    assert group.tokens == [student + SAID + between + SAID]
    second = len(shown) + len(SAID) + len(between)
    expected = [-start - i - SAID[i] / 1000 for start in (len(shown), second) for i in range(3)]
    found = group.teacher_logprobs(0)
    assert [one for one in found if one is not None] == pytest.approx(expected)
    assert [one is None for one in found] == [mask == -100 for mask in group.masks[0]]


async def test_the_teachers_system_prompt_replaces_the_students(template: ChatTemplate) -> None:
    prompts: list[tuple[Any, str]] = [
        ([{"role": "system", "content": "Short."}, {"role": "user", "content": "q"}], ""),
        ("q", "plain"),
    ]
    for prompt, kind in prompts:
        task = Rewarded(sevens)
        task.prompt = lambda _row, prompt=prompt: prompt  # type: ignore[method-assign]
        async with client_of(scoring()) as (client, server):
            teacher = Teacher(client, template, "Long.")
            await rig.sample(scripted("7"), task, ONE, template=template, teacher=teacher)
        (row,) = server.bodies("POST /v1/completions")[0]["prompt"]
        text = template.tokenizer.decode(row[: -len(SAID)])
        begin = "<|im_start|>system\nLong.<|im_end|>\n<|im_start|>user\nq"
        assert text.startswith("Long.\n\nq" if kind else begin)
        assert "Short." not in text


class Appending(Rewarded):
    """Keeps its conversation in one list."""

    drives_itself = True

    async def run(self, _row: Row, dialogue: Dialogue) -> float:
        messages: list[Message] = [{"role": "user", "content": "3+4="}]
        answer = await dialogue.say(messages)
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And twice that?"},
        ]
        await dialogue.say(messages)
        return 1.0


async def test_what_a_task_says_later_is_no_part_of_the_teachers_prompt(
    template: ChatTemplate,
) -> None:
    async with client_of(scoring()) as (client, server):
        teacher = Teacher(client, template, "Add.")
        await rig.sample(
            scripted("7", "14"), Appending(sevens), ONE, template=template, teacher=teacher
        )
    (row,) = server.bodies("POST /v1/completions")[0]["prompt"]
    assert template.tokenizer.decode(row).count("And twice that?") == 1


async def test_the_tokenizer_of_the_student_is_accepted_and_others_are_refused(
    template: ChatTemplate,
) -> None:
    tokenizer = template.tokenizer

    def text(token: int) -> str:
        found: str = tokenizer.decode([token])
        return found

    async with client_of(scoring(text)) as (client, server):
        await client.require_same_tokenizer(tokenizer)
    compared = {
        t for b in server.bodies("POST /v1/completions") for row in b["prompt"] for t in row
    }
    assert len(compared) > 64
    assert len(tokenizer) - 1 in compared
    async with client_of(scoring(lambda t: text(t ^ 1))) as (client, _):
        with pytest.raises(TeacherTokenizerDiffers, match="have other texts: 0 "):
            await client.require_same_tokenizer(tokenizer)
    refusal = {"error": {"message": "Token id 257 is out of vocabulary"}}
    async with client_of(lambda _: (400, refusal)) as (client, _):
        with pytest.raises(TeacherTokenizerDiffers, match="out of vocabulary"):
            await client.require_same_tokenizer(tokenizer)
    async with client_of(lambda _: (404, {"detail": "Not Found"})) as (client, _):
        with pytest.raises(TeacherUnusable, match="must have the route /v1/completions"):
            await client.require_same_tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("model", "served", "found"),
    [
        (None, ["a"], "a"),
        ("b", ["a", "b"], "b"),
        (None, ["a", "b"], "serves 'a', 'b'; set --teacher-model"),
        ("c", ["a"], "serves 'a', and not 'c'"),
    ],
)
async def test_the_teachers_name_is_that_of_a_served_model(
    model: str | None, served: list[str], found: str
) -> None:
    async with client_of(scoring(), model, served) as (client, _):
        if found in served:
            await client.find_model(DEADLINE_S)
            assert client.model == found
        else:
            with pytest.raises(TeacherUnusable, match=found):
                await client.find_model(DEADLINE_S)


async def test_a_server_that_lists_no_models_is_named_with_its_option() -> None:
    with stub_server({"GET /v1/models": lambda _: (200, {})}) as server:
        async with TeacherClient(f"{server.url}/v1", None, DEADLINE_S, 8, "key") as client:
            with pytest.raises(TeacherUnusable, match="; check --teacher-url, and"):
                await client.find_model(DEADLINE_S)


def shorten(answer: dict[str, Any]) -> None:
    for name in ("tokens", "token_logprobs"):
        answer["choices"][0]["logprobs"][name].pop()


def hide(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["token_logprobs"][2] = None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (shorten, r"has \[3, 3\] tokens for prompts of \[3, 4\]"),
        (hide, "no logprob for some token"),
        (lambda answer: answer["choices"][0].pop("logprobs"), "is invalid: choices.0.logprobs"),
        (lambda answer: answer["choices"].pop(), "tokens for prompts of"),
    ],
)
async def test_answers_that_do_not_fit_the_request_are_errors(change: Any, problem: str) -> None:
    async with client_of(scoring(change=change)) as (client, _):
        with pytest.raises(ProtocolViolation, match=problem):
            await client.logprobs([[1, 2, 3], [1, 2, 3, 4]])


async def test_a_teacher_that_refuses_every_group_ends_the_environment() -> None:
    refusal = {"error": {"message": "maximum context length is 4 tokens"}}
    canned: Any = SimpleNamespace()
    async with client_of(lambda _: (400, refusal)) as (client, _):
        teacher = Teacher(client, canned)
        outcome, _ = await rig.sample(right_and_wrong, teacher=teacher)
        found = lost(outcome)
        assert found.reason is FailureReason.TEACHER_REFUSED
        assert "maximum context length" in found.detail
        async with rig.engine_on(right_and_wrong, teacher=teacher) as (engine, _):
            settings = EnvServerSettings(task="arithmetic", model="m", teacher_url="http://t")
            items: Any = Mock(draw=lambda: Draw(item_of(Rewarded(sevens)), 0, 0))
            producer = GroupProducer(settings, items, engine, SimpleNamespace())  # type: ignore[arg-type]
            for _ in range(MAX_REFUSED_IN_A_ROW - 1):
                await producer.produce(PLAN, 0)
            with pytest.raises(EveryGroupRefused, match=r"teacher refused 16 .*maximum context"):
                await producer.produce(PLAN, 0)


async def test_groups_that_never_asked_the_teacher_are_no_success_of_it() -> None:
    away, dropped = TeacherUnavailable("away"), GroupLost(FailureReason.EQUAL_SCORES, "all 1")
    outcomes = [away, SampledGroup(lost=dropped), away]
    engine: Any = SimpleNamespace(roll_out=AsyncMock(side_effect=outcomes))
    settings = EnvServerSettings(
        task="arithmetic", model="m", teacher_url="http://t", request_deadline_s=1e-9
    )
    producer = GroupProducer(settings, Mock(), engine, Mock())
    await producer.produce(PLAN, 0)
    await producer.produce(PLAN, 0)
    assert producer.counts.failures[FailureReason.TEACHER_UNAVAILABLE] == 1
    with pytest.raises(ServiceUnavailable, match=r"^teacher answered no request .*away"):
        await producer.produce(PLAN, 0)


async def test_a_teacher_that_fails_is_named() -> None:
    """A server error is no reason to repeat the request; a refused connection is, until the
    deadline."""
    async with client_of(lambda _: (500, {"detail": "broken"})) as (client, _):
        with pytest.raises(TeacherUnavailable, match=r"^teacher: POST .*500: broken"):
            await client.logprobs([[1, 2]])
    async with TeacherClient("http://127.0.0.1:1", NAME, 0.01, 8, None) as client:
        with pytest.raises(TeacherUnavailable, match=r"^teacher not reachable at .*:1 for"):
            await client.logprobs([[1, 2]])


def test_options_of_a_teacher(tmp_path: Path) -> None:
    plain = EnvServerSettings(task="arithmetic", model="m")
    taught = plain.model_copy(update={"teacher_url": "http://t"})
    assert (plain.drops_equal_scores, taught.drops_equal_scores) == (True, False)
    kept = taught.model_copy(update={"drop_equal_scores": True})
    assert kept.drops_equal_scores
    (tmp_path / "long.txt").write_text("Long.\n")
    named = plain.model_copy(update={"teacher_system_prompt": f"@{tmp_path}/long.txt"})
    assert named.teacher_prompt == "Long."
    missing = plain.model_copy(update={"teacher_system_prompt": "@/nowhere"})
    hot = taught.model_copy(update={"temperature": 0.7, "top_k": 5})
    assert [m.field for m in named.teacher_mistakes()] == ["teacher_system_prompt"]
    assert [m.field for m in missing.teacher_prompt_mistakes()] == ["teacher_system_prompt"]
    assert [m.field for m in hot.teacher_mistakes()] == ["temperature", "top_k"]
