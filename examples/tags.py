"""A format: the answer must stand in tags, and nothing beside it."""

import re

from grpo_env.tasks import Task

OPPOSITES = [
    pair.split("/")
    for pair in [
        *["hot/cold", "big/small", "fast/slow", "old/young", "happy/sad", "dark/light"],
        *["rich/poor", "wet/dry", "open/closed", "day/night", "strong/weak", "high/low"],
        *["early/late", "easy/hard", "full/empty", "good/bad", "hard/soft", "heavy/light"],
        *["inside/outside", "near/far", "new/old", "right/wrong", "short/long", "thick/thin"],
        *["true/false", "up/down", "wide/narrow", "win/lose", "begin/end", "buy/sell"],
        *["come/go", "push/pull", "laugh/cry", "love/hate", "north/south", "east/west"],
        *["black/white", "clean/dirty", "first/last", "give/take", "more/less", "safe/dangerous"],
        *["sharp/dull", "start/stop", "summer/winter", "tall/short", "war/peace", "yes/no"],
    ]
]
TAGGED = re.compile(r"<answer>([^<>]*)</answer>")


class Tags(Task):
    max_completion_tokens = 16

    def rows(self, split):
        """Every fourth pair is held out."""
        return [
            {"word": word, "answer": opposite}
            for number, (word, opposite) in enumerate(OPPOSITES)
            if (number % 4 == 0) == (split == "test")
        ]

    def prompt(self, row):
        """With one example of the format."""
        return [
            {"role": "user", "content": "What is the opposite of left?"},
            {"role": "assistant", "content": "<answer>right</answer>"},
            {"role": "user", "content": f"What is the opposite of {row['word']}?"},
        ]

    def reward(self, answer, row):
        found = TAGGED.fullmatch(answer.strip())
        return {
            "accuracy": float(found is not None and found[1].strip() == row["answer"]),
            "format": 0.5 * (found is not None),
        }
