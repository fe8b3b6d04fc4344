"""The conversation loop for environments of verifiers from 0.4.

As verifiers' harness `null`: the policy answers and calls the environment's tools until it answers
without a call. But it runs in this process, where `null` starts a Python process for each rollout
and installs packages for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["InProcessHarness"]

HARNESS_ID = "grpo_in_process"
_DONE = vf.ProgramResult(exit_code=0, stdout="", stderr="")


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
        if "context_length_exceeded" in response.text:
            return _DONE  # the conversation ends with what was said so far
        if response.is_error:
            return vf.ProgramResult(exit_code=1, stdout="", stderr=response.text)
        message = response.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return _DONE
        for call in message["tool_calls"]:
            content = await _result(call["function"], call_tool)
            answer = {"role": "tool", "tool_call_id": call["id"], "content": content}
            messages.append(bound_tool_message(answer))


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


def register() -> None:
    """Let verifiers find the harness: it imports a harness as the top-level module of its id."""
    sys.modules[HARNESS_ID] = sys.modules[__name__]
