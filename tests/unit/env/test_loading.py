"""Tasks of users: files, modules, entry points, and the mistakes in them; rewards written for TRL
or verl; the examples in CONTRIBUTING.md and README.md."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import textwrap
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from grpo_env import loading
from grpo_env.__main__ import _with_made_model
from grpo_env.actions import AnswersUnusable, RewardWrong, check
from grpo_env.assembly import open_tasks
from grpo_env.loading import TaskSpec, TaskUnusable, find_task, problem_of, short_name
from grpo_env.settings import load_env_settings
from grpo_env.tasks import Answer, Graded, TaskOptions
from grpo_env.tasks.items import training_items
from grpo_env.tasks.reward_functions import as_reward

REWARD = """
from helper import right

def reward(answer, row):
    return {"accuracy": float(answer == right(row))}
"""
TASK = """
from grpo_env.tasks import Task

class Shout(Task):
    max_completion_tokens = 5

    def rows(self, split):
        return [{"word": "hi"}] if split == "train" else None

    def prompt(self, row):
        return [{"role": "user", "content": row["word"]}]

    async def reward(self, answer, row):
        return float(answer == row["word"].upper())
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "helper.py").write_text("def right(row): return row['answer']\n")
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "shouting.py").write_text(TASK)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "3+4=", "answer": "7"}) + "\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(directory: Path) -> TaskOptions:
    return TaskOptions(data=str(directory / "rows.jsonl"))


@pytest.mark.parametrize("name", ["mine.py:reward", "mine.py", "mine:reward"])
def test_a_function_in_a_file_or_a_module_is_a_task(directory: Path, name: str) -> None:
    task = TaskSpec(name, options(directory)).make()
    task.held_out = 0.0
    [item] = training_items(task)
    assert item.messages == [{"role": "user", "content": "3+4="}]
    assert task.reward(Answer("7"), item.row) == {"accuracy": 1.0}
    assert task.name == short_name(name) == "mine"


@pytest.mark.parametrize("name", ["shouting.py:Shout", "shouting:Shout", "loud"])
def test_a_class_in_a_file_a_module_or_an_installed_package_is_a_task(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(directory)
    point = EntryPoint("loud", "shouting:Shout", loading.ENTRY_POINTS)
    monkeypatch.setattr(loading, "entry_points", lambda **_group: [point])
    assert problem_of(name) is None
    task = TaskSpec(name, options(directory)).make()
    reward: Any = task.reward(Answer("HI"), {"word": "hi"})
    assert (asyncio.run(reward), task.name) == (1.0, "shout")


BROKEN = {
    "def reward(answer, row)\n    return 1": "broken.py line 1: ",
    "def rewrad(answer, row): return 1": "broken.py has no 'reward'; it defines rewrad",
}
BROKEN_WHEN_RUN = {
    "import nowhere\ndef reward(a, r): ...": "broken.py line 1: ModuleNotFoundError: No module",
    "import sys\nsys.exit(2)\ndef reward(a, r): ...": "broken.py line 2: SystemExit: 2",
    "x = 1 / 0\ndef reward(a, r): ...": "broken.py line 1: ZeroDivisionError",
    "def reward(answer): return 1": r"line 1: reward cannot be called as reward\(answer, row\)",
    "reward = 3": "reward is int, no function",
    "class reward: ...": "is a class, but no subclass of grpo_env.tasks.Task",
}


@pytest.mark.parametrize(("code", "problem"), {**BROKEN, **BROKEN_WHEN_RUN}.items())
def test_a_mistake_in_a_file_is_named_with_its_line(
    directory: Path, code: str, problem: str
) -> None:
    (directory / "broken.py").write_text(code)
    with pytest.raises(TaskUnusable, match=problem):
        find_task("broken.py:reward")
    without_running = problem_of("broken.py:reward")
    assert (without_running is not None) == (code in BROKEN)


@pytest.mark.usefixtures("directory")
def test_names_that_cannot_be_tasks_are_known_without_running_code() -> None:
    assert "cannot read no.py: No such file" in str(problem_of("no.py:reward"))
    assert problem_of("gsm8k") is problem_of("any.module:Task") is problem_of("mine.py") is None


def run_check(*words: str, workers: int = 0) -> None:
    settings = load_env_settings(["check", *words, f"--reward-workers={workers}"])
    with open_tasks(settings) as tasks:
        check(settings, tasks)


ASYNC = """
import asyncio

loops = set()

async def own(answer, row):
    loops.add(asyncio.get_running_loop())
    return float(len(loops) == 1)

async def trl(completions, **columns):
    return [await own(text, columns) for text in completions]

def later(answer, row):
    return own(answer, row)

class Judge:
    async def __call__(self, answer, row):
        return await own(answer, row)

judge = Judge()
"""


@pytest.mark.parametrize("reward", ["own", "trl", "later", "judge"])
def test_all_calls_of_an_async_reward_share_an_event_loop(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reward: str,
) -> None:
    """So that a file may have one client for a judge."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    Path("judge.py").write_text(ASYNC)
    Path("rows.jsonl").write_text('{"prompt": "3+4="}')
    Path("answers.txt").write_text("7\n8\n9\n")
    words = [f"judge.py:{reward}", "--data", "rows.jsonl", "--answers", "answers.txt"]
    run_check(*words, workers=1)
    assert capsys.readouterr().out.count("score  1.000") == 3


def test_check_grades_answers_of_a_file(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "answers.txt").write_text('7\n8\n{"row": 1, "answer": " 7"}\n')
    words = ["mine.py:reward", "--data", "rows.jsonl", "--answers", "answers.txt", "--held-out=0"]
    run_check(*words)
    shown = capsys.readouterr().out
    assert "prompt: '3+4='" in shown
    assert [line.split()[:3] for line in shown.splitlines() if "score" in line] == [
        ["score", "1.000", "'7'"],
        ["score", "0.000", "'8'"],
        ["score", "0.000", "'"],
    ]
    (directory / "helper.py").write_text("def right(row): return row['solution']\n")
    del sys.modules["helper"]
    with pytest.raises(RewardWrong, match="3 of 3 answers could not be graded"):
        run_check(*words)
    shown = capsys.readouterr().out
    assert "not graded   '7'" in shown
    assert "KeyError: 'solution'; the row has prompt, answer" in shown


def test_check_says_that_equal_scores_teach_nothing_and_refuses_a_line_without_an_answer(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "answers.txt").write_text("8\n9\n")
    words = ["mine.py:reward", "--data", "rows.jsonl", "--answers", "answers.txt", "--held-out=0"]
    run_check(*words)
    assert "all 2 answers have the score 0, and training learns nothing" in capsys.readouterr().out
    (directory / "answers.txt").write_text('7\n{"row": 2, "answr": "7"}\n')
    with pytest.raises(AnswersUnusable, match="line 2 has no key answer; it has row, answr"):
        run_check(*words)


def test_check_shows_a_long_answer_once(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "answers.txt").write_text(f"{' '.join(['word'] * 20)} end\n")
    run_check("mine.py:reward", "--data", "rows.jsonl", "--answers", "answers.txt", "--held-out=0")
    shown = capsys.readouterr().out
    assert (shown.count("word"), shown.count("word end")) == (20, 1)


def test_a_model_that_is_made_here_is_made_for_an_action() -> None:
    settings = load_env_settings(["check", "arithmetic", "--model", "tiny"])
    assert Path(_with_made_model(settings).model or "", "config.json").is_file()


MESSAGES = [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "7"}]


def test_a_reward_for_trl_gets_texts_or_messages_as_the_prompt_is() -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, answer: Any = None) -> list[float]:
        seen.append((prompts, completions, answer))
        return [0.5]

    said = Answer("7", messages=MESSAGES)  # type: ignore[arg-type]
    rows = [{"prompt": "3+4=", "answer": "7", "id": 1}, {"prompt": MESSAGES[:1], "answer": "7"}]
    assert {as_reward(reward)(said, row) for row in [*rows, {"question": "3+4="}]} == {0.5}
    assert seen == [
        (["3+4="], ["7"], ["7"]),
        ([MESSAGES[:1]], [MESSAGES[1:]], ["7"]),
        (["3+4="], ["7"], None),
    ]


async def test_a_reward_for_trl_knows_the_step_and_may_log() -> None:
    def reward(
        completions: Any, answer: Any, trainer_state: Any, log_extra: Any, log_metric: Any
    ) -> list[float]:
        log_extra("expected", answer)
        log_metric("exact", float(completions == answer))
        log_metric("exact", 0.0)
        return [trainer_state.global_step / trainer_state.max_steps]

    async def from_columns(completions: Any, **columns: Any) -> list[Any]:
        columns["log_extra"]("expected", columns["answer"])
        return [None if completions == ["?"] else columns["trainer_state"].global_step]

    said, row = Answer("7", step=2, steps=8), {"prompt": "3+4=", "answer": "7"}
    graded = Graded({"reward": 0.25}, "expected 7", metrics={"exact": 0.5})
    assert as_reward(reward)(said, row) == graded
    assert await as_reward(from_columns)(said, row) == Graded({"reward": 2}, "expected 7")
    assert await as_reward(from_columns)(Answer("?"), row) is None


def test_a_reward_for_trl_may_look_at_the_tokens_only() -> None:
    class Shorter:
        def __call__(self, completion_ids: list[list[int]], **_columns: Any) -> list[float]:
            return [-float(len(ids)) for ids in completion_ids]

    assert as_reward(Shorter())(Answer("7", token_ids=(1, 2)), {}) == -2.0


async def test_a_reward_for_verl_gets_the_right_answer() -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> Any:
        assert extra_info is None
        return {"score": float(solution_str == ground_truth), "acc": True, "pred": data_source}

    async def compute_later(solution_str: str, ground_truth: str) -> Any:
        return {"score": float(solution_str == ground_truth), "acc": 1.0}

    row = {"data_source": "sums", "answer": "7", "prompt": []}
    assert as_reward(compute_score)(Answer("7"), row) == Graded({"acc": True}, score=1.0)
    row = {"answer": "a solution", "reward_model": {"ground_truth": "7"}}
    assert await as_reward(compute_later)(Answer("7"), row) == Graded({"acc": 1.0}, score=1.0)


def test_other_functions_stay_as_they_are() -> None:
    assert as_reward(max) is max


ROOT = Path(__file__).parents[3]


def test_the_task_asks_and_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / ".github/CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"(?s)```python\n(.*?) *```", page)
    module = types.ModuleType("reversing")
    monkeypatch.setitem(sys.modules, "reversing", module)
    exec(textwrap.dedent(block), vars(module))
    task = module.Reversing(TaskOptions())
    [item, *_] = training_items(task)
    word = item.row["word"]
    assert word in item.messages[0]["content"]
    assert task.reward(Answer(word[::-1]), item.row).parts == {"accuracy": 1.0}
    assert task.reward(Answer(word), item.row).parts == {"accuracy": 0.0}


def test_the_reward_in_the_readme_is_the_example() -> None:
    code = (ROOT / "examples" / "sums.py").read_text().partition("def ")[2]
    assert f"def {code}" in (ROOT / "README.md").read_text()
    assert len(code.splitlines()) <= 12
