"""The data, the rewards and the directory of a recipe, and uploads of its model with a stand-in for
the hub's client. The real hub was never reached."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
from huggingface_hub import HfApi

from grpo_env.tasks import Answer, Graded, TaskOptions
from grpo_env.tasks.data_files import DataUnusable
from grpo_env.tasks.items import evaluation_items, training_items
from grpo_env.tasks.reward_functions import RewardInvalid
from grpo_runs.offline.errors import HubRefused, RecipeInvalid
from grpo_runs.recipe.keys import TrainingRecipe, read_recipe
from grpo_runs.recipe.main import open_directory, upload_of
from grpo_runs.recipe.task import REWARDS, RecipeTask, find_reward, register, row_count
from grpo_runs.recipe.translation import translate
from tests.unit.runs.offline.conftest import Recipes

ROW = {"prompt": "3+4=", "answer": "7", "other": 1}


def rows_file(path: Path, count: int, **more: Any) -> str:
    rows = [{"problem": f"{path.stem} {n}", "answer": n, **more} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def options_of(recipe: TrainingRecipe) -> dict[str, Any]:
    """Of the environment."""
    return translate(recipe, lambda _: 1).env_server


def task_of(recipe: TrainingRecipe) -> RecipeTask:
    options = options_of(recipe)
    arguments = json.loads(json.dumps(options["task_args"]))  # as env-server reads them
    task = RecipeTask(TaskOptions(args=arguments, system_prompt=options.get("system_prompt")))
    task.held_out = options.get("held_out", task.held_out)
    return task


SOLUTIONS = [
    "Two numbers: $3+4=7$, so \\boxed{7}",
    "3+4=<<3+4=7>>7\n#### 7",
    "<think>3+4</think><answer>7</answer>",
    7.0,
]
SAID = "3+4</think> <answer>7</answer>"
EMPTY = "<think>\n\n</think>\n\n"
"""The opening of a template whose thinking is off."""


@pytest.mark.parametrize(
    ("reward", "completion", "solution", "score"),
    [
        ("exact_answer", "<think>3+4</think> <answer>7</answer>", "7", 1.0),
        ("exact_answer", "<answer>$7$.</answer>", "7", 1.0),
        ("exact_answer", "<answer>8</answer> no: <answer>7</answer>", "7", 1.0),
        ("exact_answer", "<answer>7</answer> no: <answer>8</answer>", "7", 0.0),
        ("exact_answer", "<answer>7.0</answer>", "7", 0.0),
        ("exact_answer", "7", "7", 0.0),
        ("exact_answer", "<answer>7", "7", 0.0),
        *(
            (reward, f"<answer>{said}</answer>", solution, score)
            for reward in ("exact_answer", "equal_answer")
            for solution in SOLUTIONS
            for said, score in (("7", 1.0), ("\\boxed{7}", 1.0), ("8", 0.0))
        ),
        ("equal_answer", "<answer>0.5</answer>", "\\frac{1}{2}", 1.0),
        ("equal_answer", "<answer>0.6</answer>", "\\frac{1}{2}", 0.0),
        *(
            ("equal_answer", f"<answer>{said}</answer>", right, score)
            for right, other in (
                ("p - q", "q - p"),
                ("(1,2)", "(2,1)"),
                ("C", "B"),
                ("no one", "A"),
            )
            for said, score in ((right, 1.0), (f"\\boxed{{{right}}}", 1.0), (other, 0.0))
        ),
        ("equal_answer", "<answer>It is 7</answer>", "7", 1.0),
        ("equal_answer", "<answer>q + p</answer>", "p + q", 1.0),
        ("exact_answer", "<answer>.50</answer>", 0.5, 1.0),
        ("exact_answer", "<answer>yes</answer>", True, 1.0),
        ("exact_answer", "<answer>no</answer>", True, 0.0),
        ("exact_completion", " 7\n", 7, 1.0),
        ("exact_completion", "7.0", 7, 1.0),
        ("exact_completion", "<answer>7</answer>", 7, 0.0),
        ("answer_format", SAID, None, 0.0),
    ],
)
def test_rewards_compare_with_the_final_answer_of_a_solution(
    reward: str, completion: str, solution: Any, score: float
) -> None:
    assert find_reward(reward)(Answer(completion), {"answer": solution}) == score


@pytest.mark.parametrize(
    ("opening", "completion", "score"),
    [
        ("<think>\n", SAID, 1.0),
        (EMPTY, f"<think>{SAID}", 1.0),
        (EMPTY, "<answer>7</answer>", 0.0),
    ],
)
def test_the_format_counts_what_the_prompt_has_begun(
    opening: str, completion: str, score: float
) -> None:
    assert find_reward("answer_format")(Answer(completion, opening=opening), {}) == score


def test_rows_without_an_answer_are_refused_by_rewards_that_need_one(
    tmp_path: Path, recipe_of: Recipes
) -> None:
    file = tmp_path / "rows.jsonl"
    for answer, problem in (
        (None, "is missing"),
        ("We add the two. " * 18, r"a text of 72 words .* a reward of your own"),
    ):
        file.write_text(json.dumps({"problem": "3+4=", "answer": answer}) + "\n")
        with pytest.raises(DataUnusable, match=problem):
            training_items(task_of(recipe_of(dataset_name=str(file))))
        own = recipe_of(dataset_name=str(file), reward_funcs=["answer_format"])
        task = task_of(own)
        task.held_out = 0.0
        assert len(training_items(task)) == 1


def test_rewards_are_registered() -> None:
    register("tested")(lambda _answer, _row: 2.0)
    assert find_reward("tested")(Answer("x"), {}) == 2.0
    del REWARDS["tested"]
    with pytest.raises(RecipeInvalid, match="no reward 'tested'; there are exact_answer"):
        find_reward("tested")


async def test_rewards_of_a_file_may_have_every_form(tmp_path: Path, recipe_of: Recipes) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy\n"
        "from grpo_env.tasks import Graded\n"
        "async def later(answer, row): return 0.5\n"
        "def parts(answer, row): return {'a': numpy.True_, 'b': None}\n"
        "def reasoned(answer, row): return Graded({'c': 1.0}, 'why', score=3.0)\n"
        "def skips(answer, row): return None\n"
        "def trl(prompts, completions, other, **_): return [len(completions[0][0]['content'])]\n"
        "async def slow_trl(completions, **_): return [None]\n"
        "def verl(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth), 'acc': 1}\n"
    )
    names = [
        f"{file}:{name}"
        for name in ("later", "parts", "reasoned", "skips", "trl", "slow_trl", "verl")
    ]
    task = task_of(recipe_of(dataset_name="x.jsonl", reward_funcs=names))
    assert task.has_async_reward
    assert not task_of(recipe_of(dataset_name="x.jsonl")).has_async_reward
    answer = Answer("7", messages=[{"role": "user", "content": "3+4="}])
    graded = await task.reward(answer, ROW)  # type: ignore[misc]

    later, parts, reasoned, skips, trl, slow_trl, verl = names
    assert graded == Graded(
        {
            **{later: 0.5, parts: 1.0, f"{parts}.a": 1.0, reasoned: 3.0, f"{reasoned}.c": 1.0},
            **{skips: None, trl: 1.0, slow_trl: None, verl: 1.0, f"{verl}.acc": 1.0},
        },
        "expected 7; why",
        score=0.0,
    )
    with pytest.raises(RewardInvalid, match="every reward of reward_funcs returned None"):
        task_of(recipe_of(dataset_name="x.jsonl", reward_funcs=[skips])).reward(Answer("7"), ROW)


def test_parts_of_the_reward_are_weighted(recipe_of: Recipes) -> None:
    rewards = {"dataset_name": "x.jsonl", "reward_funcs": ["exact_answer", "answer_format"]}
    options = options_of(recipe_of(**rewards, reward_weights=[1.0, 0.2]))
    assert options["reward_weights"] == {"exact_answer": 1.0, "answer_format": 0.2}
    with pytest.raises(RecipeInvalid, match="1 weights for the 2 names"):
        options_of(recipe_of(**rewards, reward_weights=[1.0]))


def test_a_stop_text_does_not_take_the_closing_tag_away(recipe_of: Recipes) -> None:
    task: Any = task_of(recipe_of(dataset_name="x.jsonl", vllm_stop_sequences=["</answer>"]))
    assert task.stop == ("</answer>",)
    for finished, score in ((True, 1.0), (False, 0.0)):
        said = Answer("<answer>7", finished=finished)
        assert task.reward(said, {"answer": 7}).parts == {"exact_answer": score}


def test_a_weight_takes_a_share_of_its_source_and_is_no_probability(
    tmp_path: Path, recipe_of: Recipes
) -> None:
    """Half of 40 rows and all of 10 are 30 rows, each of them once."""
    columns = ["problem", "answer"]
    a, b = (rows_file(tmp_path / f"{name}.jsonl", n, noise=1) for name, n in (("a", 40), ("b", 10)))
    half = {"id": a, "weight": 0.5, "columns": columns}
    datasets = [half, {"id": b, "columns": columns[::-1]}]
    recipe = recipe_of(dataset_mixture={"datasets": datasets, "seed": 3})
    rows = task_of(recipe).rows("train")

    assert rows is not None
    sources = [row["problem"].split()[0] for row in rows]
    assert (sources.count("a"), sources.count("b")) == (20, 10)
    assert len({row["problem"] for row in rows}) == 30
    assert all(set(row) == {"problem", "answer"} for row in rows)
    assert [dict(row) for row in rows] == [dict(row) for row in task_of(recipe).rows("train") or ()]
    assert row_count(options_of(recipe)) == 30


def test_the_test_split_of_a_mixture_is_never_trained_on(
    tmp_path: Path, recipe_of: Recipes
) -> None:
    datasets = [{"id": rows_file(tmp_path / "a.jsonl", 400)}]
    mixture = {"datasets": datasets, "test_split_size": 0.25}
    recipe = recipe_of(dataset_mixture=mixture, eval_strategy="steps")
    task = task_of(recipe)

    kept, held = training_items(task), evaluation_items(task)

    assert len(kept) + len(held) == 400
    assert 60 <= len(held) <= 140
    assert not {item.key for item in kept} & {item.key for item in held}
    assert row_count(options_of(recipe)) == len(kept)


@pytest.mark.parametrize(
    ("mixture", "problem"),
    [
        ({}, "datasets: Field required"),
        ({"datasets": [{"id": "a", "wieght": 1}]}, "wieght: Unexpected"),
        ({"datasets": [{"id": "a", "weight": 2}]}, "weight: .* less than or equal to 1"),
        (
            {"datasets": [{"id": "a", "columns": ["x"]}, {"id": "b", "columns": ["y"]}]},
            "must be the same in each",
        ),
        ({"datasets": [{"id": "a"}], "test_split_size": 1.5}, "test_split_size"),
    ],
)
def test_a_wrong_mixture_is_an_error(
    recipe_of: Recipes, mixture: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RecipeInvalid, match=problem):
        options_of(recipe_of(dataset_mixture=mixture))


def test_columns_prompts_and_answers_are_found(tmp_path: Path, recipe_of: Recipes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"ask": "1+1", "gold": "2", "noise": 1}\n')
    named = {"dataset_name": str(file), "dataset_prompt_column": "ask"}
    more = {"columns": ["ask", "gold"], "system_prompt": "Think."}
    recipe = recipe_of(**named, **more, dataset_solution_column="gold")
    [item] = training_items(task_of(recipe))

    assert item.messages == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "1+1"},
    ]
    assert item.row["answer"] == "2"
    with pytest.raises(DataUnusable, match="name it with dataset_solution_column"):
        training_items(task_of(recipe_of(**named)))


def test_evaluation_uses_its_own_data(tmp_path: Path, recipe_of: Recipes) -> None:
    train, other = rows_file(tmp_path / "train.jsonl", 5), rows_file(tmp_path / "other.jsonl", 3)
    task = task_of(recipe_of(dataset_name=train, eval_dataset_name=other, eval_strategy="steps"))
    assert (len(training_items(task)), len(evaluation_items(task))) == (5, 3)


def test_an_earlier_run_goes_on_is_moved_aside_or_is_an_error(
    tmp_path: Path, recipe_of: Recipes
) -> None:
    directory = tmp_path / "run"
    assert open_directory(recipe_of(), directory) is None
    directory.mkdir()
    (directory / "keys.yaml").write_text("seed: 1\n")

    assert open_directory(recipe_of(), directory) is None
    with pytest.raises(RecipeInvalid, match="set overwrite_output_dir"):
        open_directory(recipe_of(resume_from_checkpoint=False), directory)
    with pytest.raises(RecipeInvalid, match="is no directory of a run"):
        open_directory(recipe_of(resume_from_checkpoint="gone"), tmp_path / "gone")

    moved = open_directory(recipe_of(overwrite_output_dir=True), directory)

    assert moved == tmp_path / "run.1"
    assert (moved / "keys.yaml").is_file()
    assert not directory.exists()


FLAGS = [
    *("--push_to_hub", "--hub_model_id", "sums"),
    *("--hub_model_revision", "seed-42", "--hub_token", "secret"),
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The hub's client. It has the repository me/sums with the branch main."""
    hub: Mock = create_autospec(HfApi, instance=True)
    hub.create_repo.return_value.repo_id = "me/sums"
    hub.list_repo_refs.return_value.branches = [SimpleNamespace(name="main")]
    hub.upload_folder.return_value = "https://hub/me/sums"
    monkeypatch.setattr("huggingface_hub.HfApi", lambda token: hub if token == "secret" else None)
    return hub


def test_a_model_is_uploaded_to_a_branch_that_is_made(hub: Mock, tmp_path: Path) -> None:
    def uploaded(*flags: str) -> str:
        upload = upload_of(read_recipe([*FLAGS, *flags]), tmp_path)
        assert upload is not None
        return upload(tmp_path)

    assert uploaded("--hub_private_repo", "true") == "https://hub/me/sums"
    hub.create_repo.assert_called_with("sums", private=True, exist_ok=True)
    hub.create_branch.assert_called_with("me/sums", branch="seed-42", exist_ok=True)
    sent = hub.upload_folder.call_args.kwargs
    assert (sent["repo_id"], sent["revision"]) == ("me/sums", "seed-42")
    assert sent["folder_path"] == tmp_path

    hub.list_repo_refs.return_value.branches = [SimpleNamespace(name="seed-42")]
    with pytest.raises(HubRefused, match="overwrite_hub_revision"):
        uploaded()
    uploaded("--overwrite_hub_revision")
    assert hub.upload_folder.call_count == 2


def test_what_the_hub_refuses_is_named_before_the_run_and_the_model_stays(
    hub: Mock, tmp_path: Path
) -> None:
    upload = upload_of(read_recipe(FLAGS), tmp_path)
    assert upload is not None
    hub.create_repo.side_effect = OSError("wrong token")
    hub.upload_folder.side_effect = OSError("no route")
    with pytest.raises(HubRefused, match="hub_model_id: sums: wrong token; see hub_token"):
        upload_of(read_recipe(FLAGS), tmp_path)
    with pytest.raises(HubRefused, match=f"no route; the model is in {tmp_path}. Upload it with"):
        upload(tmp_path)
