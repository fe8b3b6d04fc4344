"""smolagents 1.26: an agent with a calculator. It rewrites its conversation at every step."""

import json
import os
import sys
from contextlib import redirect_stdout

from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES


@tool
def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: for example 12+34
    """
    return str(sum(map(int, expression.split("+"))))


model = OpenAIModel(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
# A tiny model has no room for the library's own prompts.
prompts = EMPTY_PROMPT_TEMPLATES | {"system_prompt": "Call a tool."}
agent = ToolCallingAgent([calculator], model, prompt_templates=prompts, max_steps=1)
row = json.load(sys.stdin)
with redirect_stdout(sys.stderr):  # its log
    answer = agent.run(row["prompt"])
sys.stdout.write(str(answer))
