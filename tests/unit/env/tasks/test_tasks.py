"""The tasks' items, their order and their prompts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_env.rollout.chat_template import TokenizerUnusable, chat_encoder
from grpo_env.tasks import Answer, KeptItems
from grpo_env.tasks.arithmetic import Sum
from grpo_env.tasks.gsm8k import Shuffled

COUNTS, SEEDS = st.integers(1, 40), st.integers()


def take(stream: Shuffled[int], count: int) -> list[int]:
    return [stream.next() for _ in range(count)]


@pytest.mark.parametrize("completion", ["8", "07", "7 or 8", "77", ""])
def test_only_exactly_the_right_sum_scores(completion: str) -> None:
    assert Sum(3, 4).grade(Answer(completion)) == 0.0
    assert Sum(3, 4).grade(Answer(" 7\n")) == 1.0


def test_the_seed_and_the_epoch_decide_the_order() -> None:
    def draw(seed: int) -> list[int]:
        return take(Shuffled(range(50), seed), 100)

    assert draw(1) == draw(1) != draw(2)
    assert draw(1)[:50] != draw(1)[50:]


@given(COUNTS, SEEDS)
def test_every_epoch_holds_every_item_once(count: int, seed: int) -> None:
    stream = Shuffled(range(count), seed)
    for _ in range(3):
        assert sorted(take(stream, count)) == list(range(count))


@given(COUNTS, SEEDS, st.data())
def test_what_does_not_fit_never_comes_again_not_even_in_this_epoch(
    count: int, seed: int, data: st.DataObject
) -> None:
    stream = Shuffled(range(count), seed)
    seen = take(stream, data.draw(st.integers(0, count)))
    fitting = data.draw(st.sets(st.integers(0, count - 1), min_size=1))

    assert stream.keep(fitting.__contains__) == KeptItems(len(fitting), count - len(fitting))

    rest = fitting - set(seen) if len(seen) < count else set()
    assert set(take(stream, len(rest))) == rest
    assert set(take(stream, len(fitting))) == fitting


def test_the_prompt_ends_where_the_assistant_starts_and_gets_no_extra_tokens(
    tokenizer_dir: Path,
) -> None:
    from transformers import AutoTokenizer

    token_ids = chat_encoder(str(tokenizer_dir))(Sum(3, 4).messages)

    text = "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"
    assert AutoTokenizer.from_pretrained(tokenizer_dir).decode(token_ids) == text
    # Two start marks and one end mark are one token each; every other character is one token.
    assert len(token_ids) == 3 + len("user\n3+4=" + "\n" + "assistant\n")


def test_a_tokenizer_without_a_chat_template_is_refused(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tokenizer_dir, bare, ignore=shutil.ignore_patterns("chat_template*"))

    with pytest.raises(TokenizerUnusable, match="no chat template"):
        chat_encoder(str(bare))
