"""A format that no example in the prompt shows: answers in tags, learned from rows first.

`python examples/warm_start.py` prints the rows for grpo-sft. They show the format on questions of
other kinds; `UnseenTags` then rewards it, and the right answer, on opposites.
"""

import json
import random
from itertools import pairwise
from string import ascii_uppercase

from tags import Tags

WORDS = [
    *["apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island"],
    *["jacket", "kitchen", "ladder", "mirror", "needle", "orange", "pencil", "river", "table"],
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


class UnseenTags(Tags):
    def prompt(self, row):
        return [{"role": "user", "content": f"What is the opposite of {row['word']}?"}]


def rows(count=200):
    """Questions with answers in tags, in random order."""
    asked = [(f"What is the plural of {word}?", f"{word}s") for word in WORDS]
    asked += [(f"What is the first letter of {word}?", word[0]) for word in WORDS]
    asked += [(f"Which day comes after {a}?", b) for a, b in pairwise(DAYS)]
    asked += [(f"Which letter comes after {a}?", b) for a, b in pairwise(ascii_uppercase)]
    asked += [(f"Which number comes after {n}?", str(n + 1)) for n in range(1, 100)]
    asked += [(f"What is {a} plus {b}?", str(a + b)) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(asked)
    return [{"prompt": ask, "completion": f"<answer>{say}</answer>"} for ask, say in asked[:count]]


if __name__ == "__main__":
    for row in rows():
        print(json.dumps(row))  # noqa: T201 - its purpose
