"""Environments of OpenEnv as tasks. https://github.com/meta-pytorch/OpenEnv"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from grpo_core.tree.environment_values import environment_name
from grpo_core.wire.fields import FLOAT32_MAX
from grpo_env.bridges import EnvironmentUnusable, refuse_options
from grpo_env.bridges.episodes import EpisodeTask, Observation, Result, action_text
from grpo_env.bridges.openenv_server import ActionInvalid, LocalServer, OpenEnvServer, Session
from grpo_env.tasks import Answer, Message, RolloutFailed, Row, Split, TaskOptions
from grpo_env.tasks.rows import rows_of
from grpo_env.tasks.tool_calls import ToolCall, text_parameters, tool_calls, types_of

PROMPT = "prompt"
_METADATA = "metadata"
_CALL = "call_tool"
_UNREACHED = "transport_error"
_DECODER = json.JSONDecoder(strict=False)  # a model writes line breaks into strings


class OpenEnvTask(EpisodeTask):
    """Rollouts in an environment of OpenEnv.

    The class of a task of your own overrides `action_of` and `text_of`, and names its server in
    `server`.

    server: the address of a running server, the directory of an environment (with openenv.yaml), or
        an app of a module (`my_env.server.app:app`)
    """

    server: str = ""
    defaults: Mapping[str, Any] = {
        **EpisodeTask.defaults,
        "observation": "",
        "python": "",
        "deadline_s": 60.0,
    }

    def __init__(self, options: TaskOptions, server: str | None = None) -> None:
        self.server = server or self.server
        refuse_options(self.server, options, "data_config", "columns")
        super().__init__(environment_name(self.server), options)
        self._local: LocalServer | None = None

    def action_of(self, answer: Answer) -> Mapping[str, Any]:
        """The action that an answer means, as the fields of the environment's action class. Raises
        `ActionInvalid`: it means none; the policy reads why."""
        text = action_text(answer, str(self.arguments["action"]))
        return action_from(text, self._schema["action"])

    def text_of(self, observation: Mapping[str, Any]) -> str:
        """What the policy reads of an observation. observation: its fields"""
        return observation_text(observation, str(self.arguments["observation"]))

    def rows(self, split: Split) -> Sequence[Row] | None:
        """The arguments of `reset`, one row for each episode: the rows of --data, or seeds. A row's
        `prompt` is no argument: the policy reads it before the first observation.

        Raises:
            EnvironmentUnusable: the server does not answer.
            ProcessFailed: the server does not start.
        """
        assert self._schema  # the server answers
        return rows_of(self.options, split) if self.options.data else super().rows(split)

    def prompt(self, row: Row) -> list[Message]:
        """The row's own. Without one, a name of the episode: what the policy reads first is known
        after `reset`."""
        text = str(row.get(PROMPT) or f"reset {json.dumps(dict(row), default=str)}")
        return [*self._opening(), {"role": "user", "content": text}]

    @asynccontextmanager
    async def episode(self, row: Row) -> AsyncIterator[_OpenEnvEpisode]:
        arguments = {name: value for name, value in row.items() if name != PROMPT}
        async with self._server.session(arguments) as (session, first):
            yield _OpenEnvEpisode(self, session, first, str(row.get(PROMPT) or ""))

    @property
    def calls_tools(self) -> bool:
        """Whether the actions are calls of tools, which the environment lists."""
        kind = _properties(self._schema["action"]).get("type") or {}
        return kind.get("const") == _CALL

    @cached_property
    def _server(self) -> OpenEnvServer:
        deadline_s = float(self.arguments["deadline_s"])
        if "://" in self.server:
            return OpenEnvServer(self.server, deadline_s)
        self._local = _started(self.server, str(self.arguments["python"]))
        return OpenEnvServer(self._local.url, deadline_s, self._local)

    @cached_property
    def _schema(self) -> dict[str, Any]:
        return self._server.schema()

    def close(self) -> None:
        if self._local is not None:
            self._local.close()


def _started(server: str, python: str) -> LocalServer:
    directory = Path(server).expanduser()
    if not directory.is_dir():
        if ":" not in server:
            raise EnvironmentUnusable(
                f"there is no OpenEnv environment {server}: no such directory; give a directory "
                "with openenv.yaml, an app such as my_env.server.app:app, or an address such as "
                "http://localhost:8000"
            )
        return LocalServer(server, Path.cwd(), _program(python or sys.executable))
    own = directory / ".venv" / "bin" / "python"
    default = str(own) if own.exists() else sys.executable
    file = directory / "openenv.yaml"
    try:
        app = str(yaml.safe_load(file.read_text())["app"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise EnvironmentUnusable(
            f"{file} names no app ({error!r}); expected a line such as app: server.app:app"
        ) from error
    return LocalServer(app, directory.absolute(), _program(python or default))


def _program(python: str) -> str:
    """Its path from every directory; links stay, because a virtual environment is one."""
    return str(Path(python).expanduser().absolute()) if "/" in python else python


class _OpenEnvEpisode:
    """See `episodes.Episode`."""

    def __init__(
        self, task: OpenEnvTask, session: Session, first: Mapping[str, Any], question: str
    ) -> None:
        self._task, self._session, self._first = task, session, first
        self._question = question
        self.tools: Sequence[Mapping[str, Any]] = []

    async def reset(self) -> Observation:
        shown = self._shown(self._first, self._question)
        if self._task.calls_tools:
            listed = await self._session.ask("step", {"type": "list_tools"})
            self.tools = [tool_schema(tool) for tool in listed["observation"]["tools"]]
        return shown

    async def act(self, answer: Answer) -> Observation:
        if self._task.calls_tools:
            return await self._call(tool_calls(answer, text_parameters(self.tools)))
        try:
            return self._shown(await self._session.ask("step", self._task.action_of(answer)))
        except ActionInvalid as error:
            return Observation([{"role": "user", "content": f"error: {error}"}])

    async def _call(self, calls: Sequence[ToolCall]) -> Observation:
        """An answer without a call ends the episode."""
        messages: list[Message] = []
        reward, done = 0.0, not calls
        for call in calls:
            found: Mapping[str, Any] = {}
            if call.error is None:
                action = {"type": _CALL, "tool_name": call.name, "arguments": dict(call.arguments)}
                found = await self._session.ask("step", action)
            text = f"error: {call.error}" if call.error else result_text(found["observation"])
            messages.append({"role": "tool", "name": call.name, "content": text})
            reward += _reward(found)
            if done := bool(found.get("done")):
                break
        return Observation(messages, reward, done, "no call" if not calls else "")

    async def result(self) -> Result:
        state = await self._session.ask("state")
        numbers = {k: v for k, v in state.items() if isinstance(v, int | float)}
        return Result({f"state/{k}": float(v) for k, v in numbers.items() if abs(v) <= FLOAT32_MAX})

    def _shown(self, found: Mapping[str, Any], question: str = "") -> Observation:
        seen = self._task.text_of(found.get("observation") or {})
        text = "\n".join(filter(None, (question, seen)))
        return Observation(
            [{"role": "user", "content": text}],
            _reward(found),
            done := bool(found.get("done")),
            "done" if done else "",
        )


def _reward(found: Mapping[str, Any]) -> float:
    """Of one action: 0 if the environment gives none before the end. Raises `RolloutFailed`: the
    last action has none. JSON holds NaN and infinity as none, too."""
    reward = found.get("reward")
    if reward is None and found.get("done"):
        raise RolloutFailed(
            "the environment ended the episode without a finite reward; set it where done is true"
        )
    return float(reward or 0.0)


def tool_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of the environment for the chat template."""
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def action_from(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an action. If it needs one, that is the text, or the value that it holds;
    otherwise the text holds a JSON object.

    Args: schema: the JSON schema of the action

    Raises:
        ActionInvalid: the text holds no such value.
    """
    fields = _properties(schema)
    needed = [name for name in schema.get("required") or fields if name in fields]
    if len(needed) != 1:
        value = _json_in(text, "{", f"a JSON object with the fields {', '.join(fields)}")
        return dict(value)
    (field,) = needed
    kinds = types_of(fields[field], schema)
    if "string" in kinds:
        return {field: text}
    kind = " or ".join(sorted(kinds)) or "JSON"
    opening = {"object": "{", "array": "["}.get(kind, '-0123456789tfn"{[')
    return {field: _json_in(text, opening, f"a value for {field} ({kind})")}


def _json_in(text: str, opening: str, expected: str) -> Any:
    """The first JSON value that begins with one of these characters."""
    for at, character in enumerate(text):
        if character in opening:
            try:
                return _DECODER.raw_decode(text, at)[0]
            except (ValueError, RecursionError):
                continue
    raise ActionInvalid(f"expected {expected}")


def _properties(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    properties = schema.get("properties") or {}
    return {name: kind for name, kind in properties.items() if name != _METADATA}


def observation_text(observation: Mapping[str, Any], field: str = "") -> str:
    """One field as it is, several as lines `name: value`. Fields without a value are left out.

    Args: field: the only one that the policy reads

    Raises:
        EnvironmentUnusable: the observation has no such field.
    """
    if field and field not in observation:
        raise EnvironmentUnusable(
            f"observation of --task-args: no field {field!r}; there are {', '.join(observation)}"
        )
    shown = {name: value for name, value in observation.items() if name != _METADATA}
    shown = {field: observation[field]} if field else shown or observation.get(_METADATA) or {}
    texts = {name: _text(value) for name, value in shown.items() if value not in (None, "", [], {})}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "\n".join(f"{name}: {text}" for name, text in texts.items())


def result_text(observation: Mapping[str, Any]) -> str:
    """The result of a tool's call: its error, its data or the texts of its content. Raises
    `RolloutFailed`: the environment did not reach the tool."""
    if error := observation.get("error"):
        if error.get("error_type") == _UNREACHED:
            raise RolloutFailed(f"a tool of the environment: {error.get('message') or error}")
        return f"error: {error.get('message') or error}"
    result = observation.get("result")
    if not isinstance(result, Mapping):
        return _text(result)
    if (data := result.get("data")) is not None:
        return _text(data)
    return "\n".join(str(part.get("text", "")) for part in result.get("content") or ())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
