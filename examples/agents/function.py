"""An agent as a function, with the package openai: two answers side by side, then a choice."""

import asyncio

from openai import AsyncOpenAI


async def agent(row, client):
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as policy:
        question = {"role": "user", "content": row["prompt"]}

        async def ask(*messages):
            answer = await policy.chat.completions.create(model=client.model, messages=messages)
            return answer.choices[0].message.content

        first, second = await asyncio.gather(ask(question), ask(question))
        if first == second:
            return first
        said = {"role": "assistant", "content": first}
        return await ask(question, said, question)  # goes on with the first conversation


def reward(answer, row):
    """The result of the agent counts, whichever of the policy's answers it is."""
    return float(answer.state["output"] == row["answer"])
