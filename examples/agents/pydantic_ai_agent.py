"""pydantic-ai 2.68: an agent with a calculator, which streams its answers."""

import asyncio
import json
import os
import sys

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.exceptions import AgentRunError

agent = Agent(f"openai-chat:{os.environ['OPENAI_MODEL']}")


@agent.tool_plain
def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: for example 12+34
    """
    try:
        return str(sum(map(int, expression.split("+"))))
    except ValueError as error:
        return f"error: {error}"


async def answer(question):
    async with agent.run_stream(question, usage_limits=UsageLimits(request_limit=3)) as result:
        return await result.get_output()


row = json.load(sys.stdin)
try:
    sys.stdout.write(asyncio.run(answer(row["prompt"])))
except AgentRunError as error:
    sys.stdout.write(f"no answer: {error}")
