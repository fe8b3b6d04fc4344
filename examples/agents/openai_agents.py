"""openai-agents 0.24: an agent with a calculator, through the responses API."""

import json
import os
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded

set_tracing_disabled(True)  # traces would go to OpenAI


@function_tool
def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: for example 12+34
    """
    return str(sum(map(int, expression.split("+"))))


row = json.load(sys.stdin)
agent = Agent("calculator", model=os.environ["OPENAI_MODEL"], tools=[calculator])
try:
    result = Runner.run_sync(agent, row["prompt"], max_turns=3)
    sys.stdout.write(result.final_output)
except MaxTurnsExceeded as error:
    sys.stdout.write(f"no answer: {error}")
