"""A task with a tool: sums of two-digit numbers, which the tiny model can only solve by calling a
calculator."""

import ast
import operator
import random

from grpo_env.tasks import Task

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: for example 12+34
    """
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only whole numbers with +, - and * are allowed")


class Calculator(Task):
    tools = (calculator,)
    max_turns = 2
    max_completion_tokens = 96

    def rows(self, split):
        drawn = random.Random(0)
        pairs = [(drawn.randint(10, 99), drawn.randint(10, 99)) for _ in range(1000)]
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
        return rows if split == "train" else None

    def reward(self, answer, row):
        used_tool = any(message["role"] == "tool" for message in answer.messages)
        return {"accuracy": float(answer.strip() == row["answer"]), "tool": 0.1 * used_tool}
