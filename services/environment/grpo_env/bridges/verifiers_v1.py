"""Environments of verifiers from 0.4: a package that exports a `Taskset`.

verifiers conducts the rollout and rates it. It takes the address of a server, so the policy answers
through an endpoint in this process.

The loop of the conversation is that of verifiers' harness `null`: the policy answers and calls the
environment's tools until it answers without a call. But it runs in this process, where `null`
starts a Python process for each rollout and installs packages for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import structlog
import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from grpo_env.bridges import EnvironmentUnusable
from grpo_env.bridges.chat import MODEL, Chat, plain_message
from grpo_env.bridges.endpoint import CONTEXT_FULL, ChatEndpoint, HeldOpen
from grpo_env.bridges.verifiers import VerifiersTask
from grpo_env.tasks import Dialogue, Graded, Message, RolloutFailed, Row, Split, TaskOptions

__all__ = ["InProcessHarness"]
"""verifiers loads the harness of a module by this name."""

log = structlog.get_logger()

HARNESS_ID = "grpo_in_process"
_DONE = vf.ProgramResult(exit_code=0, stdout="", stderr="")

_DEFAULT_HARNESS = "bash"
"""The one that verifiers takes if neither environment nor user names one."""
_SELECT = "select"
"""Argument with the options that choose among the tasks, as `vf-eval --select.*`."""


class V1Environment(VerifiersTask):
    """An environment that `verifiers.v1.load_environment` loads.

    Its arguments are the environment's configuration, as the table `[env]` of verifiers' TOML
    files, and `select`.

    Raises:
        EnvironmentUnusable: see there.
    """

    def __init__(self, env_id: str, options: TaskOptions) -> None:
        super().__init__(env_id, options)
        # verifiers imports a harness as the top-level module of its id.
        sys.modules[HARNESS_ID] = sys.modules[__name__]
        arguments = self.arguments
        try:
            self._env = vf.load_environment(_config(env_id, arguments))
            select = vf.SelectConfig(**arguments.get(_SELECT, {}))
            self._taskset = self._env.taskset.select(select)
        except (ValidationError, ValueError, TypeError, ImportError) as error:
            raise EnvironmentUnusable(
                f"verifiers cannot load {env_id} with the arguments {dict(arguments)}: {error}"
            ) from error
        agents = (part for _, part in self._env.config if isinstance(part, vf.AgentConfig))
        if any(part.retries != vf.RetryConfig() for part in (self._env.config, *agents)):
            raise EnvironmentUnusable(
                f"the environment {env_id} repeats failed rollouts (`retries`), but the answers of "
                "a failed one are recorded too; set max_retries to 0 and remove the rules"
            )
        _require_permission(self._env, arguments)
        self._tasks: dict[int, vf.Task] = {}
        self._endpoint = ChatEndpoint(SESSION_ID_HEADER)
        self._serving = HeldOpen(self._served)

    def rows(self, split: Split) -> Sequence[Row] | None:
        """The tasks, as their data; None for evaluation, because a taskset has no splits. Raises
        `EnvironmentUnusable`: there is no end of tasks."""
        if split == "test":
            return None
        if not self._taskset.bounded:
            raise EnvironmentUnusable(
                f"the environment {self.env_id} makes tasks without end; choose a number of them "
                f"""with --task-args '{{"{_SELECT}": {{"limit": 1000}}}}'"""
            )
        if not self._tasks:
            self._tasks = {task.data.idx: task for task in self._taskset}
        tasks = self._tasks.values()
        return [task.data.model_dump(mode="json", exclude_defaults=True) for task in tasks]

    def prompt(self, row: Row) -> list[Message]:
        """Raises ValueError if the prompt holds images.

        If a simulated user opens the conversation, this is what names the task.
        """
        task = self._tasks[row["idx"]]
        system, prompt = task.data.system_prompt, task.data.prompt
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        if prompt is None or isinstance(prompt, str):
            text = task.key if prompt is None else prompt
            return [*opening, {"role": "user", "content": text}]
        return [*opening, *(plain_message(message.model_dump()) for message in prompt)]

    async def run(self, row: Row, dialogue: Dialogue) -> Graded:
        """Conduct one rollout and rate it.

        Raises:
            RolloutFailed: the environment ended the rollout with an error.
            Exception: of the dialogue.
        """
        await self._serving.wait()
        chat, opened = Chat(dialogue), list[str]()

        def open_session(trace: vf.Trace) -> None:
            self._endpoint.sessions[trace.id] = chat
            opened.append(trace.id)

        (slot,) = self._env.slots(self._tasks[row["idx"]])
        client = vf.EvalClientConfig(base_url=self._endpoint.url, api_key_var="GRPO_NO_KEY")
        try:
            episode = await self._env.run_slot(
                slot, vf.ModelContext(model=MODEL, client=client), on_trace=open_session
            )
        finally:
            for trace_id in opened:
                del self._endpoint.sessions[trace_id]
        chat.finish()
        return _graded(self.env_id, episode)

    def close(self) -> None:
        self._serving.close()

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        async with self._endpoint, self._env.serving():
            yield


def _config(env_id: str, arguments: Mapping[str, Any]) -> vf.EnvConfig:
    """The configuration, with our choice where neither environment nor user made one: agents
    converse in this process, and need neither a sandbox nor an account for it. A harness that
    somebody chose keeps verifiers' runtime, which is a sandbox."""
    config = {name: value for name, value in arguments.items() if name != _SELECT}
    config["taskset"] = {**config.get("taskset", {}), "id": env_id}
    bundles_harness = vf.default_harness_id(env_id) != _DEFAULT_HARNESS
    for name, field in vf.env_config_type(env_id, config.get("id", "")).model_fields.items():
        default = field.default
        if not isinstance(default, vf.AgentConfig):
            continue
        given = config.get(name, {})
        if default.harness is None and not bundles_harness and not given.get("harness"):
            chosen: dict[str, Any] = {"harness": {"id": HARNESS_ID}}
            if "runtime" not in default.model_fields_set:
                chosen["runtime"] = {"type": "subprocess"}
            config[name] = {**chosen, **given}
    return vf.resolve_env_config(config)


def _require_permission(env: vf.Env, arguments: Mapping[str, Any]) -> None:
    """Commands that the model writes run outside a sandbox only if the user asks for it. Raises
    `EnvironmentUnusable`: they would, and the user did not."""
    agents = {name: part for name, part in env.config if isinstance(part, vf.AgentConfig)}
    for name, agent in agents.items():
        harness = env._harnesses[name]
        if not (harness.EXECUTES_CODE and isinstance(agent.runtime, vf.SubprocessConfig)):
            continue
        what = (
            f"harness {harness.config.id} runs commands that the model writes, on this host and "
            "as this user"
        )
        if "runtime" not in arguments.get(name, {}):
            raise EnvironmentUnusable(
                f"{what}; choose a sandbox with --task-args "
                f"""'{{"{name}": {{"runtime": {{"type": "docker"}}}}}}', or allow it with """
                '{"type": "subprocess"}'
            )
        log.warning("verifiers.model_commands", agent=name, effect=what)


def _graded(env_id: str, episode: vf.Episode) -> Graded:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        listed = (f"{error.type}: {error.message}\n{error.traceback or ''}" for error in errors)
        raise RolloutFailed("\n".join(listed))
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1 or len(episode.traces) != 1:
        names = ", ".join(trace.agent.name for trace in episode.traces)
        raise EnvironmentUnusable(
            f"{env_id} has several agents in one rollout ({names}); only one can be trained"
        )
    (trace,) = trained
    scores = {name: reward and reward.score for name, reward in trace.rewards.items()}
    parts = {**trace.metrics, **scores}
    if missing := sorted(name for name, value in parts.items() if value is None):
        raise RolloutFailed(f"not rated: {', '.join(missing)} ({trace.stop_condition})")
    return Graded(parts, trace.stop_condition or "", score=trace.reward)


class InProcessHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """No options of its own."""


class InProcessHarness(vf.Harness[InProcessHarnessConfig]):  # type: ignore[misc]
    """See the module. `launch` has verifiers' signature."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,  # noqa: ARG002
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        async with AsyncExitStack() as stack:
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout}
                for name, url in mcp_urls.items()
            }
            schemas, routes, connections = await connect_mcp({"mcpServers": servers}, stack)
            headers = {"Authorization": f"Bearer {secret}"}
            client = await stack.enter_async_context(
                # Plain HTTP on the loopback interface; loading certificates takes 30 ms.
                httpx.AsyncClient(headers=headers, timeout=None, verify=False, trust_env=False)
            )

            async def call_tool(name: str, arguments: dict[str, Any]) -> Any:
                if name not in routes:
                    return f"error: unknown tool {name!r}"
                return await call_mcp(connections, routes, name, arguments)

            body: dict[str, Any] = {"model": ctx.model, "messages": self._opening(data)}
            if schemas:
                body["tools"] = schemas
            return await _converse(client, f"{endpoint}/chat/completions", body, call_tool)

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(message_to_wire(message) for message in prompt or ())]


async def _converse(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], call_tool: Any
) -> vf.ProgramResult:
    messages: list[dict[str, Any]] = body["messages"]
    while True:
        response = await client.post(url, json=body)
        if response.is_error:
            if _code_of(response) == CONTEXT_FULL:
                return _DONE  # the conversation ends with what was said so far
            return vf.ProgramResult(exit_code=1, stdout="", stderr=response.text)
        message = response.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return _DONE
        for call in message["tool_calls"]:
            content = await _result(call["function"], call_tool)
            answer = {"role": "tool", "tool_call_id": call["id"], "content": content}
            messages.append(bound_tool_message(answer))


def _code_of(refusal: httpx.Response) -> Any:
    """verifiers passes the endpoint's refusal on as a text: `upstream 400: {"error": ...}`."""
    try:
        return json.loads(refusal.json()["error"]["message"].partition(": ")[2])["error"]["code"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None  # a refusal of verifiers itself


async def _result(function: Mapping[str, str], call_tool: Any) -> Any:
    """What the tool returns, or what is wrong with the call, as `null` says it."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return f"error: tool arguments must be a JSON object, got {kind}; resend as an object"
    return await call_tool(function["name"], arguments)
