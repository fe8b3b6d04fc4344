from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_env.grading.math_grader import NotGraded
from grpo_env.rollout.rollout import grade_all
from grpo_env.tasks import Answer, DatasetTask
from grpo_env.tasks.gsm8k import INSTRUCTION, AskedProblem, Gsm8k
from grpo_env.tasks.gsm8k_data import DatasetsMissing, DataUnusable, Problem, read_problems

PROBLEMS = [Problem("How many eggs?", "13"), Problem("How much?", "1080000")]


FORMS = ["#### {}", "{}", "#### {}\nBye", "#### 5\n#### {}", "so\n#### {}", "it is {}", "no {} ?"]


def same_text(answer: str, gold: str) -> bool:
    """Stands in for the grading process, which has its own tests."""
    if "^" in answer:
        raise NotGraded(f"{answer!r}: not graded within 2 s")
    return answer == gold


def asked(share: float = 0.3) -> AskedProblem:
    return AskedProblem(Problem("How much?", "18"), same_text, share)


@pytest.mark.parametrize(
    ("text", "finished", "score"),
    [
        ("9 * 2 = 18\n#### 18", True, 1.3),
        ("9 * 2 = 18\n18", True, 1.2),
        ("#### 18\nI hope th", False, 1.0),
        ("9 + 2 = 11\n#### 11", True, 0.3),
        ("it is 11", True, 0.1),
        ("#### 18\nGood luck!", True, 1.0),
        ("no idea", True, 0.0),
        # The answer is cut off in its last line, so the number may lack digits.
        ("#### 18", False, 0.0),
        ("#### 18\n#### 1", False, 1.0),
    ],
)
def test_scores_by_hand(text: str, finished: bool, score: float) -> None:
    assert asked().grade(Answer(text, finished)) == pytest.approx(score)


@given(
    right=st.sampled_from(FORMS[:5]),
    wrong=st.sampled_from(FORMS),
    number=st.integers(-100, 10_000).filter(lambda number: number != 18),
    finished=st.booleans(),
    share=st.floats(0.0, 0.99),
)
def test_a_right_answer_beats_every_wrong_one_whatever_their_form(
    right: str, wrong: str, number: int, finished: bool, share: float
) -> None:
    item = asked(share)
    assert item.grade(Answer(right.format(18))) > item.grade(Answer(wrong.format(number), finished))


@pytest.mark.parametrize("hack", ["7", "#### 17\n" * 50, "####" * 100, "\n" * 500, INSTRUCTION])
def test_nothing_cheap_beats_an_honest_attempt_in_the_form_asked_for(hack: str) -> None:
    honest_but_wrong = asked().grade(Answer("She eats 3, so 16 - 3 = 13 are left.\n#### 13"))

    assert asked().grade(Answer(hack)) < honest_but_wrong


def test_an_answer_without_a_verdict_is_quarantined_and_no_zero() -> None:
    grades = grade_all(asked(), [Answer("#### 18"), Answer("#### 9^9^9^9")])

    assert grades.scores == pytest.approx((1.3,))
    assert len(grades.quarantined) == 1


def test_long_prompts_can_be_left_out() -> None:
    task = Gsm8k(PROBLEMS, seed=0, is_equal=same_text, format_reward=0.3)
    assert isinstance(task, DatasetTask)

    task.keep(lambda item: item.messages[1]["content"] == "How much?")

    assert {task.next_item().problem for _ in range(3)} == {PROBLEMS[1]}


def write_lines(directory: Path, *lines: str) -> str:
    (directory / "train.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return str(directory)


def test_json_lines_are_read_in_order_and_every_bad_line_is_listed(tmp_path: Path) -> None:
    good = [
        {"question": "How many eggs?", "answer": "16 - 3 = <<16-3=13>>13\n#### 13"},
        {"question": "How much?", "answer": "A lot.\n#### 1,080,000"},
    ]
    lines = [json.dumps(row) for row in good]
    bad = {
        "{": "the row is not JSON",
        '{"answer": "#### 1"}': "the field 'question' is empty",
        '{"question": "How?", "answer": "13"}': "the field 'answer' has no '####'",
        '{"question": "How?", "answer": "#### many"}': (
            "field 'answer': expected a number after '####', got 'many'"
        ),
    }
    assert read_problems(write_lines(tmp_path, *lines), "main", "train") == PROBLEMS
    with pytest.raises(DataUnusable) as failure:
        read_problems(write_lines(tmp_path, *lines, *bad), "main", "train")

    first, *listed = str(failure.value).splitlines()
    assert first.endswith(": 4 of 6 rows are invalid:")
    for number, (line, problem) in enumerate(zip(listed, bad.values(), strict=True), start=3):
        assert line.startswith(f"{tmp_path}/train.jsonl line {number}: {problem}")


def test_a_directory_laid_out_like_a_hub_data_set_is_read_with_datasets(
    hub_layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_problems(str(hub_layout), "main", "train") == PROBLEMS
    assert read_problems(str(hub_layout), "main", "test") == PROBLEMS[:1]
    with pytest.raises(DataUnusable, match=r"configuration 'socratic', split 'train'.*main"):
        read_problems(str(hub_layout), "socratic", "train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetsMissing, match=r"pip install -c constraints\.txt datasets"):
        read_problems(str(hub_layout), "main", "train")


def test_what_is_neither_a_directory_nor_a_hub_id_or_is_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataUnusable, match="/no/such/directory: no such directory"):
        read_problems("/no/such/directory", "main", "train")
    with pytest.raises(DataUnusable, match=r"train\.jsonl contains no rows"):
        read_problems(write_lines(tmp_path), "main", "train")
