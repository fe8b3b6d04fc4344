"""What a page holds of a run: texts of single tokens, its groups, its curves, and its bounded
size."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from grpo_core.errors import BrokenRollouts
from grpo_core.rollouts.page.encode import GroupEncoder
from grpo_core.rollouts.page.token_texts import TokenTexts
from grpo_core.rollouts.page.write import write_page
from grpo_core.rollouts.record import RolloutRecord
from tests.support.conversations import END, SPECIAL, START, TOKENIZER, conversation, group

TEXTS = TokenTexts(TOKENIZER)
DATA = re.compile(r'<script type="text/plain" id="(.*?)">(.*?)</script>')


def data_of(page: Path) -> dict[str, Any]:
    """By the id of its element."""
    return {
        name: json.loads(gzip.decompress(base64.b64decode(packed)))
        for name, packed in DATA.findall(page.read_text())
    }


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def test_the_prompt_of_a_group_is_held_once() -> None:
    encoder = GroupEncoder(TEXTS)
    details = encoder.details(group("2+2=", [("4", 1.0), ("5", 0.0)]))
    prompt = f"{START}user\n2+2={END}{START}assistant\n"
    assert details["prompt"]["tokens"] == ids(prompt)
    assert [one["tokens"] for one in details["sequences"]] == [ids(f"4{END}"), ids(f"5{END}")]
    assert encoder.texts[ids("4")[0]] == "4"


def test_equal_beginnings_of_completions_are_no_prompt() -> None:
    details = GroupEncoder(TEXTS).details(group("2+2=", [("4", 1.0), ("4", 1.0)]))
    assert [one["tokens"] for one in details["sequences"]] == 2 * [ids(f"4{END}")]


def test_logprobs_follow_the_mask() -> None:
    """Two turns of one letter and the end token, between them the answer of a tool."""
    record = conversation(
        ("user", "q"), ("assistant", "a"), ("tool", "t"), ("assistant", "b"), reason="r"
    )
    record = replace(
        record,
        behaviour_logprobs=[-0.5, -1.0, -1.5, -2.0],
        logprobs=[-0.5, -1.1, -1.25, -2.0],
        teacher_logprobs=[-0.25, None, -3.0, 0.0],
    )
    (sequence,) = GroupEncoder(TEXTS).details([record])["sequences"]
    tool = len(ids(f"{START}tool\nt{END}{START}assistant\n"))
    assert sequence["runs"] == [2, tool, 2]
    assert sequence["server"] == [-5000, -10000, -15000, -20000]
    assert sequence["difference"] == [0, -10000, 25000, 0]
    assert sequence["teacher"] == [-2500, None, -30000, 0]


def test_parts_of_characters_are_exceptions_to_the_texts_of_ids() -> None:
    """Both characters end with the same byte: its text depends on the bytes before."""
    encoder = GroupEncoder(TEXTS)
    assert ids("ä")[1] == ids("Ĥ")[1]
    (sequence,) = encoder.details([conversation(("user", ""), ("assistant", "äĤ"))])["sequences"]
    assert [encoder.texts[token] for token in ids("ä")] == ["", "ä"]
    assert sequence["texts"] == {3: "Ĥ"}


def test_lists_of_different_lengths_are_refused() -> None:
    record = replace(conversation(("user", "q"), ("assistant", "a"), group=3), logprobs=[-1.0])
    problem = "step 1, group 3, sequence 0: 1 logprobs for 2 trained tokens"
    with pytest.raises(BrokenRollouts, match=problem):
        GroupEncoder(TEXTS).details([record])


def test_without_a_tokenizer_the_messages_are_shown() -> None:
    encoder = GroupEncoder(None)
    record = conversation(("system", "s"), ("user", "q"), ("assistant", "a"))
    details = encoder.details([record])
    assert details["prompt"]["text"] == "system: s\nuser: q"
    assert details["sequences"][0]["text"] == "a"
    assert encoder.summary([record])["snippet"] == "q"


def test_a_group_is_listed_with_the_beginning_of_its_question() -> None:
    encoder = GroupEncoder(TEXTS, TEXTS.special)
    asked = conversation(("user", "word  " * 50), ("assistant", "a"))
    assert encoder.summary([asked])["snippet"] == ("word " * 16)[:79] + "…"
    assert encoder.summary([replace(asked, messages=[])])["snippet"].startswith("user word word")


def steps(count: int, length: int = 1) -> Iterator[RolloutRecord]:
    """In each step four groups of two. The completions differ, so that they stay large."""
    for step in range(1, count + 1):
        for at in range(4):
            answers = [(f"{(7919 * step + at) ** 40}"[:length], 1.0), ("no", 0.0)]
            yield from group("q", answers, step=step, group=at)


def test_a_page_holds_every_step_if_they_fit(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_page(page, "t", steps(9), {}, TEXTS, {"Mode": "none"}, special=TEXTS.special)
    data = data_of(page)
    content = data.pop("content")
    assert [one["step"] for one in content["steps"]] == [*range(1, 10)]
    assert [one["group"] for one in content["steps"][8]["groups"]] == [0, 1, 2, 3]
    assert content["steps"][8]["groups"][0]["sequences"] == [[1.0, 0.5, 2], [0.0, -0.5, 3]]
    assert content["facts"] == [["Mode", "none"]]
    assert [len(step["groups"]) for step in data.values()] == 9 * [4]
    assert [*tmp_path.iterdir()] == [page]


def test_a_page_that_would_be_too_large_holds_steps_at_equal_distances(tmp_path: Path) -> None:
    page, limit = tmp_path / "report.html", 16_000
    write_page(page, "t", steps(30, length=100), {}, TEXTS, {}, limit=limit)
    data = data_of(page)
    content = data.pop("content")
    shown = [one["step"] for one in content["steps"]]
    distances = {later - earlier for earlier, later in pairwise(shown[:-1])}
    assert (shown[0], shown[-1], content["all_steps"]) == (1, 30, 30)
    assert len(distances) == 1
    assert len(shown) >= 4
    assert len(data) == len(shown)
    (reward,) = (one for one in content["curves"] if one["name"] == "reward/mean")
    assert reward["points"] == [[step, 0.5] for step in range(1, 31)]
    sizes = [len(packed) for name, packed in DATA.findall(page.read_text()) if name != "content"]
    assert sum(sizes[:-1]) <= limit


def test_a_step_that_would_be_too_large_holds_some_of_its_groups(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_page(page, "t", steps(1, length=100), {}, TEXTS, {}, limit=8 * 900)
    data = data_of(page)
    (step,) = data["content"]["steps"]
    shown = [one["group"] for one in step["groups"]]
    assert shown[0] == 0
    assert 1 <= len(shown) < step["all_groups"] == 4
    assert len(data["step-0"]["groups"]) == len(shown)


def test_curves_of_the_rollouts_join_the_given_ones(tmp_path: Path) -> None:
    """The given ones win. Means over the sequences that have a value."""
    page = tmp_path / "report.html"
    first = conversation(("user", "q"), ("assistant", "a"), parts={"format": 0.5}, staleness=None)
    second = replace(first, index=1, score=0.0, parts={}, staleness=3)
    given = {"reward/mean": [(1, 0.25)], "eval/gsm8k/pass@1": [(0, 0.5)], "policy/entropy": []}
    intervals = {"eval/gsm8k/pass@1": [(0, 0.4, 0.6)]}
    write_page(page, "t", [first, second], given, None, {}, intervals=intervals)
    curves = data_of(page)["content"]["curves"]
    assert [(one["title"], one["points"]) for one in curves] == [
        ("Mean reward", [[1, 0.25]]),
        ("Evaluation: pass@1 on gsm8k", [[0, 0.5]]),
        ("Reward part: format", [[1, 0.5]]),
        ("Completion length", [[1, 2]]),
        ("Logprob difference", [[1, 0.125]]),
        ("Staleness", [[1, 3]]),
    ]
    assert curves[1]["interval"] == [[0, 0.4, 0.6]]


def test_texts_of_a_run_stand_nowhere_in_the_html(tmp_path: Path) -> None:
    """Except the title, which is escaped. A title may be a name of the template."""
    page, hostile = tmp_path / "report.html", "</script><b>{{data}}\ud800"
    record = conversation(("user", "</script>"), ("assistant", "<b>"), reason=hostile)
    write_page(page, hostile, [record], {hostile: [(1, 1)]}, TEXTS, {hostile: hostile})
    written = page.read_text()
    assert written.count("{{data}}") == 1
    assert "<title>&lt;/script&gt;&lt;b&gt;{{data}}&#55296;</title>" in written
    assert written.count("</script>") == 3
    assert "<b>" not in written
    data = data_of(page)
    assert data["content"]["facts"] == [[hostile, hostile]]
    assert data["step-0"]["groups"][0]["sequences"][0]["reason"] == hostile


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
