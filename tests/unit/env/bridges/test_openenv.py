"""Actions and observations of OpenEnv as texts, and answers of its servers that are unusual. The
bridge itself: tests/compat/test_openenv.py."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, test_utils, web

from grpo_env.bridges import EnvironmentUnusable
from grpo_env.bridges.openenv import (
    OpenEnvTask,
    action_from,
    observation_text,
    result_text,
    tool_schema,
)
from grpo_env.bridges.openenv_server import ActionInvalid, LocalServer, OpenEnvServer
from grpo_env.loading import TaskSpec, short_name
from grpo_env.tasks import Graded, RolloutFailed, TaskOptions
from tests.support.wait import DEADLINE_S
from tests.unit.env.bridges.scripted import ScriptedDialogue

METADATA = {"metadata": {"type": "object", "default": {}}}


def schema(required: list[str], **kinds: str) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    return {"properties": {**METADATA, **properties}, "required": required}


MESSAGE = schema(["message"], message="string", timeout="number")
MOVE = schema(["row", "column"], row="integer", column="integer")
OPTIONAL = {"properties": {"say": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    ("text", "of", "action"),
    [
        ("hello {there}", MESSAGE, {"message": "hello {there}"}),
        ("I choose 3.", schema(["action_id"], action_id="integer"), {"action_id": 3}),
        ("all of [1, 2]", schema(["tokens"], tokens="array"), {"tokens": [1, 2]}),
        ('{no} {"row": 1, "column": 2} .', MOVE, {"row": 1, "column": 2}),
        ('{"word": "a"}', schema([], word="string", size="integer"), {"word": "a"}),
        ("a", schema([], word="string"), {"word": "a"}),
        ("1.50", OPTIONAL, {"say": "1.50"}),
    ],
)
def test_an_answer_becomes_an_action(text: str, of: dict[str, Any], action: Any) -> None:
    assert action_from(text, of) == action


@pytest.mark.parametrize(
    ("text", "of", "problem"),
    [
        ("row 1", MOVE, "expected a JSON object with the fields row, column"),
        ("{row: 1}", MOVE, "expected a JSON object"),
        ("left", schema(["n"], n="integer"), r"expected a value for n \(integer\)"),
    ],
)
def test_an_answer_that_is_no_action_is_explained(
    text: str, of: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ActionInvalid, match=problem):
        action_from(text, of)


@pytest.mark.parametrize(
    ("observation", "field", "text"),
    [
        ({"echoed": "hi", "metadata": {"step": 1}}, "", "hi"),
        ({"stdout": "a\nb", "stderr": "", "exit_code": 0}, "", "stdout: a\nb\nexit_code: 0"),
        ({"stdout": "a\nb", "stderr": "", "exit_code": 0}, "stdout", "a\nb"),
        ({"board": [0, 1], "legal": None}, "", "[0, 1]"),
        ({"metadata": {"message": "ready"}}, "", "ready"),
        ({}, "", ""),
    ],
)
def test_an_observation_becomes_a_text(observation: Any, field: str, text: str) -> None:
    assert observation_text(observation, field) == text


def test_a_field_that_the_observation_lacks_is_named() -> None:
    with pytest.raises(EnvironmentUnusable, match="no field 'prompt'; there are board, legal"):
        observation_text({"board": 1, "legal": 2}, "prompt")


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"result": {"data": "3", "content": [{"type": "text", "text": "no"}]}}, "3"),
        ({"result": {"data": None, "content": [{"type": "text", "text": "3"}]}}, "3"),
        ({"result": {"data": {"sum": 3}}}, '{"sum": 3}'),
        ({"result": 3, "error": None}, "3"),
        ({"error": {"error_type": "timeout", "message": "too late"}}, "error: too late"),
    ],
)
def test_the_result_of_a_tool_becomes_a_text(observation: Any, text: str) -> None:
    assert result_text(observation) == text


def test_a_tool_that_the_environment_does_not_reach_fails_the_rollout() -> None:
    with pytest.raises(RolloutFailed, match="no route"):
        result_text({"error": {"error_type": "transport_error", "message": "no route"}})


def test_a_tool_of_an_environment_is_one_for_the_chat_template() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert tool_schema({"name": "add", "description": "Adds.", "input_schema": parameters}) == {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": parameters},
    }


def test_environments_have_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_env").mkdir()
    monkeypatch.chdir(tmp_path / "my_env")
    places = ["envs/my_env/", ".", "http://host:8000/", "my_env.server.app:app"]
    names = [short_name(f"openenv:{place}") for place in places]
    assert names == ["my_env", "my_env", "host-8000", "my_env"]


@pytest.mark.parametrize(
    ("server", "arguments", "problem"),
    [
        ("nowhere", {}, "no OpenEnv environment nowhere: no such directory"),
        ("{}", {}, "openenv.yaml names no app .* expected a line such as app: server.app:app"),
        ("{}", {"turns": 3}, "has no argument turns; it has episodes, first_seed, max_turns"),
    ],
)
def test_what_is_no_environment_is_refused_by_name(
    tmp_path: Path, server: str, arguments: dict[str, Any], problem: str
) -> None:
    spec = TaskSpec(f"openenv:{server.format(tmp_path)}", TaskOptions(args=arguments))
    with pytest.raises(Exception, match=problem):
        spec.make().rows("train")


def test_columns_mean_nothing_for_arguments_of_reset() -> None:
    with pytest.raises(EnvironmentUnusable, match="omit --columns, and use --task-args"):
        OpenEnvTask(TaskOptions(columns={"a": "b"}), "http://localhost:8000")


Serve = Callable[[web.WebSocketResponse], Awaitable[None]]


@asynccontextmanager
async def served(serve: Serve, autoping: bool = True) -> AsyncIterator[str]:
    """The address of a server that does this with each session."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=autoping)
        await socket.prepare(request)
        await serve(socket)
        return socket

    async def schema(_: web.Request) -> web.Response:
        return web.json_response({"action": {}, "observation": {}})

    app = web.Application()
    app.router.add_get("/ws", handle)
    app.router.add_get("/schema", schema)
    async with test_utils.TestServer(app) as server:
        yield str(server.make_url("/"))


async def test_a_server_on_this_machine_is_reached_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)

    async def serve(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        await socket.send_json({"data": {"first": 1}})

    async with served(serve) as url:
        server = OpenEnvServer(url, DEADLINE_S)
        assert (await asyncio.to_thread(server.schema))["action"] == {}
        async with server.session({}) as (_, first):
            assert first == {"first": 1}


def test_a_local_server_gets_no_secret_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\nenv; echo Uvicorn running on http://127.0.0.1:1; exec sleep 600\n"
    )
    python.chmod(0o755)
    for name in ("RUN_API_TOKEN", "HF_TOKEN", "ITS_OWN"):
        monkeypatch.setenv(name, f"value-of-{name}")
    server = LocalServer("server.app:app", tmp_path, str(python))
    shown = server.process.log_text()
    server.close()
    assert re.findall(r"value-of-\w+", shown) == ["value-of-ITS_OWN"]


async def test_pings_of_the_server_are_answered_while_the_policy_thinks() -> None:
    replies: asyncio.Queue[WSMsgType] = asyncio.Queue()

    async def serve(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        await socket.send_json({"data": {}})
        await socket.ping()
        replies.put_nowait((await socket.receive()).type)

    async with served(serve, autoping=False) as url, OpenEnvServer(url, DEADLINE_S).session({}):
        assert await asyncio.wait_for(replies.get(), DEADLINE_S) is WSMsgType.PONG


async def played(ended: Mapping[str, Any], state: Mapping[str, Any]) -> Graded:
    """A rollout with one action, after which the server answers so."""

    async def serve(socket: web.WebSocketResponse) -> None:
        for data in ({"observation": {"text": "begin"}}, ended, state):
            await socket.receive()
            await socket.send_json({"data": data})

    async with served(serve) as url:
        task = OpenEnvTask(TaskOptions(args={"max_turns": 1}), url)
        task._schema = {"action": MESSAGE}
        return await task.run({"seed": 0}, ScriptedDialogue("a"))


async def test_no_reward_counts_0_before_the_end_and_fails_the_rollout_there() -> None:
    assert (await played({"reward": None, "done": False}, {})).score == 0.0
    with pytest.raises(RolloutFailed, match="without a finite reward"):
        await played({"reward": None, "done": True}, {})


async def test_numbers_of_the_state_that_float32_does_not_hold_are_left_out() -> None:
    state = {"steps": 1, "won": True, "best": 1e39, "id": 10**400, "name": "a"}
    graded = await played({"reward": 1.0, "done": True}, state)
    assert {name for name in graded.parts if "/" in name} == {"state/steps", "state/won"}
