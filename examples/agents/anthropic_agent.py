"""anthropic 2.11: an agent with a calculator, through Anthropic's messages API, streamed."""

import json
import os
import sys

from anthropic import Anthropic, beta_tool


@beta_tool
def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: for example 12+34
    """
    return str(sum(map(int, expression.split("+"))))


row = json.load(sys.stdin)
runner = Anthropic().beta.messages.tool_runner(
    model=os.environ["ANTHROPIC_MODEL"],
    max_tokens=96,
    max_iterations=3,
    tools=[calculator],
    messages=[{"role": "user", "content": row["prompt"]}],
    stream=True,
)
for stream in runner:
    message = stream.get_final_message()
sys.stdout.write("".join(block.text for block in message.content if block.type == "text"))
