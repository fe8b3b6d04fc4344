"""What the command line does to the words before Hydra reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from grpo_offline.command_line import given_names, job_keys, words_for_hydra
from grpo_offline.errors import KeysInvalid, RunUnusable
from grpo_offline.keys import CONFIG_FILE, OfflineKeys
from grpo_offline.run_files import RunFiles


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.lr=1e-5"], ["train.lr=1e-5"]),
        (["-m", "train.lr=[5e-6, 1e-5]", "seed=1"], ["-m", "train.lr=5e-6,1e-5", "seed=1"]),
        (["train.lr=1,2", "--multirun"], ["train.lr=1,2", "--multirun"]),
        (["eval.ids=[1,2]"], ["eval.ids=[1,2]"]),
        (["-m", "eval.ids=[1,2],[3]"], ["-m", "eval.ids=[1,2],[3]"]),
        (["grpo.objective=dapo"], ["++grpo.objective=dapo"]),
        (["-m", "grpo.clip_eps=0.1,0.2"], ["-m", "++grpo.clip_eps=0.1,0.2"]),
        (["hydra.run.dir=d", "--cfg", "job"], ["hydra.run.dir=d", "--cfg", "job"]),
        (["-m", "grpo.clip_eps=[0.1,0.2]"], ["-m", "++grpo.clip_eps=0.1,0.2"]),
        (["checkpoint.resume=null"], ["checkpoint.resume=null"]),
    ],
)
def test_words(words: list[str], expected: list[str]) -> None:
    assert words_for_hydra(words) == expected


def test_a_run_goes_on_in_its_directory_whatever_its_name(tmp_path: Path) -> None:
    directory = tmp_path / "lr=1, it's (new)"
    RunFiles(directory).write_keys(OfflineKeys())
    quoted = "'" + str(directory).replace("'", "\\'") + "'"
    words = words_for_hydra([f"checkpoint.resume={directory}", "train.iterations=20"])
    assert words == [
        f"checkpoint.resume={quoted}",
        "train.iterations=20",
        f"hydra.run.dir={quoted}",
    ]
    with initialize_config_dir(str(CONFIG_FILE.parent)):
        found = compose("offline_grpo", words[:2])
    assert found.checkpoint.resume == str(directory)


def test_a_mistyped_directory_is_no_run_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(RunUnusable, match="name the directory of a run"):
        words_for_hydra([f"checkpoint.resume={tmp_path}/typo"])
    assert not (tmp_path / "typo").exists()


def test_a_key_cannot_be_removed() -> None:
    with pytest.raises(KeysInvalid, match="write KEY=VALUE"):
        words_for_hydra(["~train.lr"])


def test_a_list_for_one_value_names_the_option_that_is_missing() -> None:
    with pytest.raises(KeysInvalid, match=r"add -m: .* -m train.lr='\[5e-6,1e-5\]'"):
        words_for_hydra(["train.lr=[5e-6,1e-5]"])


@pytest.mark.parametrize("name", ["train.batch_size", "data.rollouts_per_problem"])
def test_sizes_that_checkpoints_count_in_cannot_change(tmp_path: Path, name: str) -> None:
    RunFiles(tmp_path).write_keys(OfflineKeys())
    section, _, key = name.partition(".")
    composed = {"checkpoint": {"resume": str(tmp_path)}, section: {key: 2}}
    with pytest.raises(RunUnusable, match=name):
        job_keys(composed, [name])


def test_the_evaluation_follows_to_another_server_when_a_run_goes_on(tmp_path: Path) -> None:
    RunFiles(tmp_path).write_keys(OfflineKeys())
    url = "http://h:2"
    composed = {"checkpoint": {"resume": str(tmp_path)}, "generation": {"base_url": url}}
    keys = job_keys(composed, ["generation.base_url"])
    assert keys.eval.base_url == keys.generation.base_url


def test_a_run_goes_on_with_its_keys_but_for_those_that_are_given(tmp_path: Path) -> None:
    directory = str(tmp_path)
    earlier = OfflineKeys.model_validate({"train": {"lr": 3e-4, "iterations": 7}, "seed": 3})
    RunFiles(tmp_path).write_keys(earlier)
    given = [f"checkpoint.resume={directory}", "train.iterations=9"]
    composed = OfflineKeys.model_validate(
        {"train": {"iterations": 9}, "checkpoint": {"resume": directory}}
    ).model_dump()
    keys = job_keys(composed, given_names(given))
    assert (keys.train.lr, keys.train.iterations, keys.seed) == (3e-4, 9, 3)


def test_a_directory_without_a_run_cannot_be_resumed() -> None:
    with pytest.raises(RunUnusable, match="name the directory of a run"):
        job_keys({"checkpoint": {"resume": "/no/run"}}, [])


def test_the_name_of_a_run_reaches_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_NAME", "before")
    job_keys({"logging": {"wandb": {"run_name": "mine"}}}, [])
    assert os.environ["WANDB_NAME"] == "mine"


def test_an_invalid_value_is_named_with_its_key() -> None:
    with pytest.raises(KeysInvalid, match=r"train\.lr"):
        job_keys({"train": {"lr": -1}}, [])
