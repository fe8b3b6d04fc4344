from __future__ import annotations

from itertools import product

import pytest

from grpo_env.grading import grade_all
from grpo_env.math_grader import NotGraded
from grpo_env.tasks import Answer, DatasetTask
from grpo_env.tasks.gsm8k import INSTRUCTION, AskedProblem, Gsm8k
from grpo_env.tasks.gsm8k_data import Problem

SHARE = 0.3
PROBLEMS = [Problem(f"How much is {n}?", str(n)) for n in range(20)]


class SameText:
    """Stands for the grading process, which has tests of its own."""

    def is_equal(self, answer: str, gold: str) -> bool:
        if "^" in answer:
            raise NotGraded(f"{answer!r}: no verdict within 2 s")
        return answer == gold


def asked(gold: str = "18", share: float = SHARE) -> AskedProblem:
    return AskedProblem(Problem("How much?", gold), SameText(), share)


def gsm8k(seed: int = 0) -> Gsm8k:
    return Gsm8k(PROBLEMS, seed, SameText(), SHARE)


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
        ("", True, 0.0),
        ("#### 18", False, 0.0),
        ("18", False, 0.0),
    ],
)
def test_scores_by_hand(text: str, finished: bool, score: float) -> None:
    assert asked().grade(Answer(text, finished)) == pytest.approx(score)


def test_a_right_answer_beats_every_wrong_one_whatever_their_form() -> None:
    forms = ["#### {}", "{}", "#### {}\nBye", "#### 5\n#### {}", "so\n#### {}"]
    right = [asked().grade(Answer(form.format(18))) for form in forms]
    wrong = [
        asked().grade(Answer(form.format(17), finished))
        for form, finished in product([*forms, "it is {}", "no idea {} ?"], [True, False])
    ]
    assert min(right) > max(wrong)


@pytest.mark.parametrize(
    "hack",
    [
        "7",
        "7" * 500,
        "#### 17\n" * 50,
        "#### ",
        "####" * 100,
        " ".join(map(str, range(500))),
        "\n".join(map(str, range(500))),
        "\n" * 500,
        INSTRUCTION,
    ],
)
def test_nothing_cheap_beats_an_honest_attempt_in_the_form_asked_for(hack: str) -> None:
    honest_but_wrong = asked().grade(Answer("She eats 3, so 16 - 3 = 13 are left.\n#### 13"))

    assert asked().grade(Answer(hack)) < honest_but_wrong
    # The same hack, longer, earns no more.
    assert asked().grade(Answer(hack + hack)) <= asked().grade(Answer(hack))


def test_without_a_share_only_the_right_answer_counts() -> None:
    item = asked(share=0.0)

    assert item.grade(Answer("#### 18")) == item.grade(Answer("18")) == 1.0
    assert item.grade(Answer("#### 17")) == 0.0


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


def test_epochs_are_shuffled_by_the_seed_and_repeat_nothing() -> None:
    def epoch(task: Gsm8k) -> list[str]:
        return [task.next_item().problem.gold for _ in PROBLEMS]

    task = gsm8k()
    first, second = epoch(task), epoch(task)
    assert sorted(first) == sorted(second) == sorted(p.gold for p in PROBLEMS)
    assert first != second
    assert first == epoch(gsm8k())
    assert first != epoch(gsm8k(seed=1))


def test_long_prompts_can_be_left_out() -> None:
    task = gsm8k()
    assert isinstance(task, DatasetTask)

    kept = task.keep(lambda item: len(item.messages[1]["content"]) == len("How much is 1?"))

    assert (kept.kept, kept.skipped) == (10, 10)
    assert {task.next_item().problem.gold for _ in range(30)} == set("0123456789")
