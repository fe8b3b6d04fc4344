"""Texts of single tokens: joined they are the text, whatever the tokens split."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from grpo_core.errors import BrokenRollouts
from grpo_core.rollouts.page import TokenTexts
from tests.support.conversations import END, SPECIAL, START, TOKENIZER

TEXTS = TokenTexts(TOKENIZER)


@given(st.text())
def test_joined_texts_are_the_text(text: str) -> None:
    assert "".join(TEXTS(TOKENIZER.encode(text).ids)) == text


@given(st.lists(st.integers(0, 257)))
def test_bytes_that_are_no_text_become_the_replacement_character(tokens: list[int]) -> None:
    shown = TEXTS(tokens)
    assert len(shown) == len(tokens)
    assert "".join(shown) == TOKENIZER.decode(tokens, skip_special_tokens=False)


def test_the_last_token_of_a_character_has_it() -> None:
    assert TEXTS(TOKENIZER.encode(f"a\n🙂{END}").ids) == ["a", "\n", "", "", "", "🙂", END]


def test_a_character_that_is_cut_off_belongs_to_its_own_token() -> None:
    first = TOKENIZER.encode("🙂").ids[0]
    assert TEXTS([first, *SPECIAL, first]) == ["\ufffd", START, END, "\ufffd"]


def test_special_tokens_are_known_and_ids_outside_the_vocabulary_are_named() -> None:
    assert TEXTS.special == {*SPECIAL}
    assert TEXTS([999]) == ["[999]"]


def test_a_vocabulary_of_sentencepiece() -> None:
    """Words begin with a sign, and bytes of unknown characters are tokens of their own."""
    words = ["▁the", "▁", "n", "<0x0A>", "<0xC3>", "<0xA4>"]
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assert TokenTexts(tokenizer)(range(6)) == [" the", " ", "n", "\n", "", "ä"]


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(BrokenRollouts, match=r"tokenizer\.json cannot be read as a tokenizer"):
        TokenTexts.from_file(path)
