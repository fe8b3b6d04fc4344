"""Python that the model writes, rated by tests that run in the sandbox: functions for a pretrained
model, and expressions for the tiny model, which knows nothing but sums."""

import random
import re
import uuid

from grpo_env.sandbox import Limits, run_python
from grpo_env.tasks import Task

LIMITS = Limits(seconds=5, cpu_s=2)


class Functions(Task):
    max_completion_tokens = 64
    question = "Write a Python function `f(x)` that returns {what}. Answer with the code only."

    def rows(self, split):
        drawn = random.Random(split)
        return [self.row(drawn) for _ in range(400 if split == "train" else 32)]

    def row(self, drawn):
        a, b = drawn.randint(2, 20), drawn.randint(1, 20)
        what, right = drawn.choice(
            [
                (f"x plus {a}", lambda x: x + a),
                (f"x times {a}", lambda x: x * a),
                (f"x times {a}, plus {b}", lambda x: x * a + b),
                (f"the larger one of x and {a}", lambda x: max(x, a)),
                ("the square of x", lambda x: x**2),
            ]
        )
        tests = [f"assert f({x}) == {right(x)}" for x in (0, 1, 7, 50)]
        return {"prompt": self.question.format(what=what), "tests": tests}

    def reward(self, answer, row):
        """1 if all tests pass; 0.1 for code that at least runs to its end."""
        passed = tests_passed(code_of(answer), row["tests"])
        return {"tests": float(passed == len(row["tests"])), "runs": 0.1 * (passed >= 0)}


class Expressions(Functions):
    max_completion_tokens = 8

    def row(self, drawn):
        a, b = drawn.randint(0, 9), drawn.randint(0, 9)
        return {"prompt": f"{a}+{b}=", "tests": [f"assert value == {a + b}"]}

    def reward(self, answer, row):
        passed = tests_passed(f"value = {answer}", row["tests"])
        return {"tests": float(passed == 1), "runs": 0.1 * (passed >= 0)}


def code_of(answer):
    """The first block of code; without one, the whole answer."""
    found = re.search(r"```(?:python)?\n(.*?)(?:```|$)", answer, re.DOTALL)
    return found[1] if found else answer


def tests_passed(code, tests):
    """The number of tests that the code passes; -1 if it does not run to its end."""
    mark = uuid.uuid4().hex  # which the code does not print by accident
    tried = (f"try:\n    {test}\n    print({mark!r})\nexcept Exception: pass" for test in tests)
    ended = run_python("\n".join([code, *tried, f"print({mark!r})"]), limits=LIMITS)
    return ended.output.count(mark) - 1 if ended.ok else -1
