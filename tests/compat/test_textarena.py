"""Games of unmodified TextArena run as tasks."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_env.bridges import EnvironmentUnusable
from grpo_env.bridges.textarena import TextArenaTask
from grpo_env.loading import TaskSpec
from grpo_env.tasks import TaskOptions
from tests.compat.upstream_processes import installed
from tests.unit.env.bridges.scripted import ScriptedDialogue

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # the first use installs packages

HIGHER, LOWER = "The target number is higher.", "The target number is lower."
PINS = Path(__file__).parents[2] / "requirements" / "textarena.txt"


@pytest.fixture(autouse=True)
def _textarena(monkeypatch: pytest.MonkeyPatch) -> None:
    (packages,) = installed(PINS).python.parents[1].glob("lib/*/site-packages")
    monkeypatch.syspath_prepend(packages)


def game(name: str = "GuessTheNumber-v0", **arguments: Any) -> TextArenaTask:
    task = TaskSpec(f"textarena:{name}", TaskOptions(args=arguments)).make()
    assert isinstance(task, TextArenaTask)
    return task


async def play(task: TextArenaTask, *answers: str, seed: int = 0) -> tuple[Any, list[str]]:
    """The grade, and what the game said."""
    dialogue = ScriptedDialogue(*answers)
    graded = await task.run({"seed": seed}, dialogue)
    return graded, [m["content"] for m in dialogue.requests[-1] if m["role"] == "user"]


async def test_a_game_is_played_to_its_end() -> None:
    task = game(game={"max_number": 5}, episodes=4)
    rows = task.rows("train")
    assert rows is not None
    assert (task.name, len(rows)) == ("GuessTheNumber-v0", 4)
    [opening] = task.prompt(rows[0])
    assert "guess the number between 1 and 5 within 10 turns" in opening["content"]

    scores = {}
    for number in range(1, 6):
        graded, said = await play(task, f"I say [{number}]", seed=0)
        assert said == [opening["content"]] or said[1] in (HIGHER, LOWER)
        scores[number] = graded
    [(secret, won)] = [(number, one) for number, one in scores.items() if one.score == 1.0]
    assert won.reason == "Congratulations! You guessed the correct number."
    assert dict(won.parts) == {"invalid_move": 0.0, "turns": 1.0, "last_reward": 1.0}
    other = 1 if secret > 1 else 2
    graded, said = await play(task, f"[{other}]", str(secret), seed=0)  # it adds the brackets
    assert (graded.score, said[1]) == (1.0, HIGHER if secret > other else LOWER)


async def test_invalid_moves_end_a_game_and_an_unfinished_one_scores_nothing() -> None:
    task = game()
    graded, said = await play(task, "[hello]", "[none]")
    assert (graded.score, graded.parts["invalid_move"]) == (0.0, 1.0)
    assert said[1].startswith("You attempted an invalid move")
    unfinished, _ = await play(game("Mastermind-v0", max_turns=1), "[1 2 3 4]")
    assert (unfinished.score, unfinished.reason) == (0.0, "turn limit")


async def test_a_seed_makes_the_same_game_and_leaves_the_process_its_random_numbers() -> None:
    task = game("Bandit-v0")
    random.seed(1)
    expected = random.Random(1).random()
    (_, first), (_, second) = [await play(task, *["[red]"] * 6, seed=3) for _ in range(2)]
    assert first == second
    assert random.random() == expected


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("TicTacToe-v0", {}, "cannot be played: The number of players has to be 2, received 1"),
        ("Nothing-v0", {}, "Environment Nothing-v0 not found"),
        ("GuessTheNumber-v0", {"game": {"largest": 5}}, "unexpected keyword argument 'largest'"),
        ("GuessTheNumber-v0", {"seeds": 5}, "has no argument seeds; it has episodes, first_seed"),
    ],
)
def test_what_cannot_be_played_is_refused(name: str, arguments: Any, problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        game(name, **arguments)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(
        EnvironmentUnusable, match=f"pip install --no-deps -r requirements/{PINS.name}"
    ):
        game()
