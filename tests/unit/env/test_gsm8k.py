from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_env.grading import grade_all
from grpo_env.math_grader import NotGraded
from grpo_env.tasks import Answer, DatasetTask
from grpo_env.tasks.gsm8k import INSTRUCTION, AskedProblem, Gsm8k
from grpo_env.tasks.gsm8k_data import Problem

FORMS = [
    "#### {}",
    "{}",
    "#### {}\nBye",
    "#### 5\n#### {}",
    "so\n#### {}",
    "it is {}",
    "no idea {} ?",
]


class SameText:
    """Stands for the grading process, which has tests of its own."""

    def is_equal(self, answer: str, gold: str) -> bool:
        if "^" in answer:
            raise NotGraded(f"{answer!r}: no verdict within 2 s")
        return answer == gold


def asked(share: float = 0.3) -> AskedProblem:
    return AskedProblem(Problem("How much?", "18"), SameText(), share)


@pytest.mark.parametrize(
    ("text", "finished", "score"),
    [
        ("9 * 2 = 18\n#### 18", True, 1.3),
        ("9 * 2 = 18\n18", True, 1.2),
        ("#### 18\nI hope this helps", True, 1.0),
        ("#### 18\nI hope th", False, 1.0),
        ("9 + 2 = 11\n#### 11", True, 0.3),
        ("9 + 2 = 11\n11", True, 0.2),
        ("it is 11", True, 0.1),
        ("no idea", True, 0.0),
        ("#### 18", False, 0.0),
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


@pytest.mark.parametrize(
    "hack",
    ["7", "#### 17\n" * 50, "####" * 100, " ".join(map(str, range(500))), "\n" * 500, INSTRUCTION],
)
def test_nothing_cheap_beats_an_honest_attempt_in_the_form_asked_for(hack: str) -> None:
    honest_but_wrong = asked().grade(Answer("She eats 3, so 16 - 3 = 13 are left.\n#### 13"))

    assert asked().grade(Answer(hack)) < honest_but_wrong
    # The same hack, longer, earns no more.
    assert asked().grade(Answer(hack + hack)) <= asked().grade(Answer(hack))


def test_an_answer_without_a_verdict_is_quarantined_and_no_zero() -> None:
    grades = grade_all(asked(), [Answer("#### 18"), Answer("#### 9^9^9^9")])

    assert grades.scores == pytest.approx((1.3,))
    assert grades.quarantined == ("completion 1: '9^9^9^9': no verdict within 2 s",)


def test_the_prompt_asks_for_the_form_in_few_characters() -> None:
    system, user = asked().messages

    assert system["role"] == "system"
    assert system["content"].endswith("#### <number>")
    assert len(system["content"]) < 60
    assert user == {"role": "user", "content": "How much?"}


def test_long_prompts_can_be_left_out() -> None:
    problems = [Problem(f"How much is {n}?", str(n)) for n in range(20)]
    task = Gsm8k(problems, seed=0, equality=SameText(), format_reward=0.3)
    assert isinstance(task, DatasetTask)

    task.keep(lambda item: len(item.messages[1]["content"]) == len("How much is 1?"))

    assert {task.next_item().problem.gold for _ in range(30)} == set("0123456789")
