"""Checks with verifiers before 0.4. Run by test_verifiers.py in an environment of its own."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

from grpo_env.bridges import EnvironmentUnusable
from grpo_env.bridges.verifiers import VerifiersTask
from grpo_env.loading import verifiers_task
from grpo_env.tasks import RolloutFailed, TaskOptions
from tests.compat.bridge.both import CALL, row_of
from tests.unit.env.bridges.scripted import ScriptedDialogue

ROWS = [{"question": "3+4=", "answer": "7"}]


def task_of(load: Callable[..., Any], **arguments: Any) -> VerifiersTask:
    """Of a module `made` with this function as load_environment."""
    module = ModuleType("made")
    module.load_environment = load  # type: ignore[attr-defined]
    sys.modules["made"] = module
    return verifiers_task("made", TaskOptions(args=arguments))


class Holding(vf.Rubric):  # type: ignore[misc]
    """released: one for each rollout whose resources it released."""

    released: ClassVar[list[Any]] = []

    @vf.cleanup
    async def release(self, state: Any) -> None:
        self.released.append(state)


def single_turn(*functions: Any, **how: Any) -> Callable[..., Any]:
    return lambda: vf.SingleTurnEnv(
        dataset=Dataset.from_list(ROWS), rubric=Holding(funcs=[*functions]), **how
    )


def scripted_client(*texts: str) -> OpenAIChatCompletionsClient:
    """verifiers' own client, on a server that sends these texts or calls `add` with 1 and 1."""
    left = [*texts]

    def answer(_request: httpx.Request) -> httpx.Response:
        text = left.pop(0)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if text == CALL:
            function = {"name": "add", "arguments": json.dumps({"a": 1, "b": 1})}
            call = {"id": "1", "type": "function", "function": function}
            message = {"role": "assistant", "content": "I add.", "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        return httpx.Response(200, json={**head, "choices": [choice]})

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return OpenAIChatCompletionsClient(
        AsyncOpenAI(base_url="http://model/v1", api_key="none", http_client=http)
    )


@pytest.mark.parametrize(
    ("environment", "texts"),
    [
        ("one_digit_sums", [" 4"]),
        ("one_digit_sums", ["four"]),
        ("one_digit_sums", ["5"]),
        ("calculator", [CALL, "4"]),
        ("calculator", [CALL, CALL, "5"]),
        ("calculator", ["4"]),
    ],
)
async def test_reward_and_metrics_equal_those_of_verifiers_itself(
    environment: str, texts: list[str]
) -> None:
    row = row_of(
        verifiers_task(environment, TaskOptions()), index=4 if "sums" in environment else 8
    )
    assert row["answer"] == "4"
    env = vf.load_environment(environment)
    (expected,) = (await env.generate([row], scripted_client(*texts), "m"))["outputs"]

    graded = await verifiers_task(environment, TaskOptions()).run(row, ScriptedDialogue(*texts))
    assert (graded.score, graded.parts) == (expected["reward"], expected["metrics"])
    assert graded.reason == expected["stop_condition"]


def broken() -> float:
    raise ZeroDivisionError("in the reward")


async def broken_later() -> float:
    raise ZeroDivisionError("in the reward")


def no_number() -> Any:
    return None


@pytest.mark.parametrize(
    ("function", "error"),
    [(broken, ZeroDivisionError), (broken_later, ZeroDivisionError), (no_number, TypeError)],
)
async def test_a_reward_that_fails_is_an_error_and_no_reward_of_0(
    function: Any, error: type[Exception]
) -> None:
    task = task_of(single_turn(function))
    Holding.released.clear()
    with pytest.raises(error):
        await task.run(row_of(task), ScriptedDialogue("7"))
    assert len(Holding.released) == 1

    children = [single_turn(function)(), single_turn(function)()]
    group = task_of(lambda: vf.EnvGroup(children))
    with pytest.raises(error):
        await group.run(row_of(group), ScriptedDialogue("7"))


async def test_an_error_of_the_environment_ends_the_rollout_by_name() -> None:
    class Unreachable(vf.MultiTurnEnv):
        async def env_response(self, *_: Any, **__: Any) -> Any:
            raise vf.InfraError("the sandbox is gone")

    task = task_of(
        lambda: Unreachable(dataset=Dataset.from_list(ROWS), rubric=Holding(funcs=[lambda: 1.0]))
    )
    Holding.released.clear()
    with pytest.raises(RolloutFailed, match="InfraError: the sandbox is gone"):
        await task.run(row_of(task), ScriptedDialogue("7"))
    assert len(Holding.released) == 1


def ranks(completions: Any) -> list[float]:
    """The longest answer of the group gets 1."""
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


async def test_a_group_is_rated_together_and_every_answer_gets_its_own_reward() -> None:
    task = task_of(single_turn(ranks))
    assert task.rates_groups
    # The first one answers last.
    late = ScriptedDialogue("777", delay_s=0.05)
    dialogues = [late, ScriptedDialogue("7"), ScriptedDialogue("7")]
    graded = await task.run_group(row_of(task), dialogues)
    assert [(g.score, g.parts["ranks"]) for g in graded] == [(1.0, 1.0), (0.0, 0.0), (0.0, 0.0)]

    in_a_group = task_of(lambda: vf.EnvGroup([single_turn(ranks)(), single_turn(ranks)()]))
    assert in_a_group.rates_groups
    assert not task_of(single_turn(broken)).rates_groups


async def test_limits_of_the_environment_count_and_its_temperature_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sampling = {"max_tokens": 5, "stop": ["\n"], "temperature": 0.1}
    task = task_of(single_turn(lambda: 1.0, sampling_args=sampling))
    dialogue = ScriptedDialogue("7")
    await task.run(row_of(task), dialogue)
    assert dialogue.options == [{"tools": [], "max_tokens": 5, "stop": ("\n",)}]
    printed = capsys.readouterr().out
    assert "verifiers.sampling_ignored" in printed
    assert "['temperature']" in printed


def test_loading_keeps_the_signal_handlers_of_the_process() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    verifiers_task("one_digit_sums", TaskOptions())
    assert [signal.getsignal(number) for number in numbers] == before


class OwnAdvantages(vf.Rubric):
    has_advantages = True


@pytest.mark.parametrize(
    ("name", "options", "load", "problem"),
    [
        ("absent-env", {}, None, "no module absent_env"),
        ("one_digit_sums", {"args": {"level": 2}}, None, "unexpected keyword argument 'level'"),
        ("one_digit_sums", {"data": "rows.jsonl", "system_prompt": "x"}, None,
         "omit --data, --system-prompt, and use --task-args"),
        ("made", {}, lambda: SimpleNamespace(env_id="x", env_args={"a": 1}),
         "returned SimpleNamespace; expected a verifiers.Environment"),
        ("made", {}, lambda: vf.SingleTurnEnv(
            dataset=Dataset.from_list(ROWS), rubric=OwnAdvantages(funcs=[broken])),
         "computes advantages itself"),
        ("made", {}, None, r"defines no load_environment.*'verifiers>=0.4'"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(
    name: str, options: dict[str, Any], load: Any, problem: str
) -> None:
    if name == "made":
        module = sys.modules["made"] = ModuleType("made")
        if load is not None:
            module.load_environment = load  # type: ignore[attr-defined]
    with pytest.raises(EnvironmentUnusable, match=problem):
        verifiers_task(name, TaskOptions(**options))


def test_rows_for_evaluation_are_held_out() -> None:
    task = verifiers_task("one_digit_sums", TaskOptions(args={"with_evaluation": True}))
    assert len(task.rows("test") or ()) == 3


def test_an_environment_for_evaluation_alone_cannot_be_trained() -> None:
    task = task_of(
        lambda: vf.SingleTurnEnv(
            eval_dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[broken])
        )
    )
    with pytest.raises(EnvironmentUnusable, match="no data set for training"):
        task.rows("train")
