"""langgraph 1.2 with langchain-openai 1.7: a graph of a model and a calculator."""

import json
import os
import sys

from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: for example 12+34
    """
    return str(sum(map(int, expression.split("+"))))


model = ChatOpenAI(model=os.environ["OPENAI_MODEL"]).bind_tools([calculator])


def ask(state):
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("ask", ask)
graph.add_node("tools", ToolNode([calculator], handle_tool_errors=True))
graph.add_edge(START, "ask")
graph.add_conditional_edges("ask", tools_condition)
graph.add_edge("tools", "ask")
row = json.load(sys.stdin)
try:
    state = graph.compile().invoke({"messages": [("user", row["prompt"])]}, {"recursion_limit": 6})
    sys.stdout.write(state["messages"][-1].text)
except GraphRecursionError as error:
    sys.stdout.write(f"no answer: {error}")
