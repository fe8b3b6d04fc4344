"""What the command line does to the words before Hydra reads them."""

from __future__ import annotations

import pytest

from grpo_offline.command_words import given_names, words_for_hydra
from grpo_offline.errors import KeysInvalid, RunUnusable
from grpo_offline.keys import OfflineKeys
from grpo_offline.keys_of_job import keys_of_job
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
        (["checkpoint.resume=/d"], ["checkpoint.resume=/d", "hydra.run.dir=/d"]),
        (["checkpoint.resume=null"], ["checkpoint.resume=null"]),
    ],
)
def test_words(words: list[str], expected: list[str]) -> None:
    assert words_for_hydra(words) == expected


def test_a_list_for_one_value_names_the_option_that_is_missing() -> None:
    with pytest.raises(KeysInvalid, match=r"add -m: .* -m train.lr='\[5e-6,1e-5\]'"):
        words_for_hydra(["train.lr=[5e-6,1e-5]"])


def test_a_run_goes_on_with_its_keys_but_for_those_that_are_given(tmp_path: object) -> None:
    directory = str(tmp_path)
    earlier = OfflineKeys.model_validate({"train": {"lr": 3e-4, "iterations": 7}, "seed": 3})
    RunFiles(tmp_path).write_keys(earlier)  # type: ignore[arg-type]
    given = [f"checkpoint.resume={directory}", "train.iterations=9"]
    composed = OfflineKeys.model_validate(
        {"train": {"iterations": 9}, "checkpoint": {"resume": directory}}
    ).model_dump()
    keys = keys_of_job(composed, given_names(given))
    assert (keys.train.lr, keys.train.iterations, keys.seed) == (3e-4, 9, 3)


def test_a_directory_without_a_run_cannot_be_resumed() -> None:
    with pytest.raises(RunUnusable, match="name the directory of a run"):
        keys_of_job({"checkpoint": {"resume": "/no/run"}}, [])


def test_an_invalid_value_is_named_with_its_key() -> None:
    with pytest.raises(KeysInvalid, match=r"train\.lr"):
        keys_of_job({"train": {"lr": -1}}, [])
