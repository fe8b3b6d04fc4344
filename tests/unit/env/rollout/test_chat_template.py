"""Equal prompts are rendered once."""

from __future__ import annotations

from typing import Any

from grpo_env.rollout.chat_template import TokenizerTemplate

QUESTION = [{"role": "user", "content": "3+4="}]


class CountingTokenizer:
    """Every character of what it renders is a token."""

    def __init__(self) -> None:
        self.rendered: list[str] = []

    def apply_chat_template(self, messages: Any, tools: Any = None, **_: Any) -> str:
        self.rendered.append(messages[0]["content"] + str(len(tools or ())))
        return self.rendered[-1]

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


def test_equal_prompts_are_rendered_once_and_nobody_changes_what_is_kept() -> None:
    tokenizer = CountingTokenizer()
    template = TokenizerTemplate(tokenizer)
    first = template.prompt_ids(QUESTION)
    first.append(0)
    assert template.prompt_ids([*QUESTION]) == list(b"3+4=0")
    assert template.prompt_ids(QUESTION, [{"name": "f"}]) == list(b"3+4=1")
    assert tokenizer.rendered == ["3+4=0", "3+4=1"]


def test_the_oldest_prompt_makes_room() -> None:
    tokenizer = CountingTokenizer()
    template = TokenizerTemplate(tokenizer)
    for number in (*range(257), 256, 1, 0):
        template.prompt_ids([{"role": "user", "content": f"{number}:"}])
    assert tokenizer.rendered[257:] == ["0:0"]
