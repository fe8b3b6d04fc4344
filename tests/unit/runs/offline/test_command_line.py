"""The command line: what it does to the words before Hydra reads them, the keys that its messages
name, and the jobs of a sweep."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from grpo_core.settings.options import Option
from grpo_env.pacing import RolloutsFail
from grpo_runs.offline import __main__ as command
from grpo_runs.offline import loop, sweep
from grpo_runs.offline.command_line import job_keys, words_for_hydra
from grpo_runs.offline.errors import KeysInvalid, RunUnusable
from grpo_runs.offline.keys import (
    CONFIG_FILE,
    KEY_OF_OPTION,
    KEYS,
    SECTIONS,
    OfflineKeys,
    in_keys,
    in_recipe,
    sets_of,
)
from grpo_runs.offline.results import RunResult
from grpo_runs.offline.run_files import RunFiles
from grpo_runs.offline.servers import Sampling
from grpo_runs.offline.translate import environment_settings
from grpo_runs.recipe.translation import names_of


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
    RunFiles(directory).write_keys(OfflineKeys.model_validate({}))
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


@pytest.mark.parametrize(
    ("word", "error", "reason"),
    [
        ("checkpoint.resume=typo", RunUnusable, "name the directory of a run"),
        ("~train.lr", KeysInvalid, "write KEY=VALUE"),
        (
            "weight_decay=1",
            KeysInvalid,
            r"^weight_decay: no such key; conf/offline_grpo.yaml lists all keys$",
        ),
        ("+train.bath_size=1", KeysInvalid, r"^\+train.bath_size: .* mean train.batch_size\?$"),
        ("train.lr=[5e-6,1e-5]", KeysInvalid, r"add -m: .* -m train.lr='\[5e-6,1e-5\]'"),
    ],
)
def test_a_wrong_word_names_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, error: type[Exception], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=reason):
        words_for_hydra([word])
    assert not [*tmp_path.iterdir()]  # a mistyped name makes no directory


def resumed(directory: Path, earlier: dict[str, Any], **given: Any) -> OfflineKeys:
    """The keys of a run that goes on. Args: given: by section"""
    RunFiles(directory).write_keys(OfflineKeys.model_validate(earlier))
    composed = OfflineKeys.model_validate(given | {"checkpoint": {"resume": str(directory)}})
    names = [f"{section}.{name}" for section, keys in given.items() for name in keys]
    return job_keys(composed.model_dump(), names, directory)


@pytest.mark.parametrize("name", ["train.batch_size", "data.rollouts_per_problem"])
def test_sizes_that_checkpoints_count_in_cannot_change(tmp_path: Path, name: str) -> None:
    section, _, key = name.partition(".")
    with pytest.raises(RunUnusable, match=name):
        resumed(tmp_path, {}, **{section: {key: 2}})


def test_a_run_goes_on_with_its_keys_but_for_those_that_are_given(tmp_path: Path) -> None:
    """An evaluation that followed the rollouts follows them to another server."""
    earlier = {"train": {"lr": 3e-4, "iterations": 7}, "seed": 3}
    server = {"base_url": "http://h:2"}
    keys = resumed(tmp_path, earlier, train={"iterations": 9}, generation=server)
    assert (keys.train.lr, keys.train.iterations, keys.seed) == (3e-4, 9, 3)
    assert keys.eval.base_url == keys.generation.base_url == "http://h:2"


def test_the_name_of_a_run_reaches_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_NAME", "before")
    job_keys({"logging": {"wandb": {"run_name": "mine"}}}, [], tmp_path)
    assert os.environ["WANDB_NAME"] == "mine"


@pytest.mark.parametrize(
    ("said", "in_hydra", "in_a_recipe"),
    [
        ("raise --steps", "raise train.iterations", "raise max_steps"),
        ("lower --lr.", "lower train.lr.", "lower learning_rate."),
        ("--lora-r 7: no", "grpo.lora_r 7: no", "lora_r 7: no"),
        ("--clip-eps", "grpo.clip_eps", "epsilon"),
        ("set sync.mode=none", "set sync.mode=none", "set sync_mode=none"),
        (
            "in --model or --tokenizer.",
            "in model.train_id or env_server.tokenizer.",
            "in model_name_or_path.",
        ),
        (
            "--model, --tokenizer and --data",
            "model.train_id, env_server.tokenizer and env_server.data",
            "model_name_or_path and dataset_name",
        ),
        ("vllm-api-server --enable-lora", "vllm-api-server --enable-lora", None),
        (
            "read /a/model.bin, grpo_trainer.model.x",
            "read /a/model.bin, grpo_trainer.model.x",
            None,
        ),
    ],
)
def test_options_become_keys(said: str, in_hydra: str, in_a_recipe: str | None) -> None:
    assert in_keys(said) == in_hydra
    assert in_recipe(said, names_of()) == (in_a_recipe or in_hydra)


def test_a_key_has_the_type_of_the_option_that_it_sets() -> None:
    for path, field in KEYS.items():
        for option in sets_of(field).same:
            section, _, name = option.partition(".")
            of = Option(name, SECTIONS[section].model_fields[name])
            assert Option(path, field).kind == of.kind, path
    for option in KEY_OF_OPTION:
        section, _, name = option.partition(".")
        assert name in SECTIONS[section].model_fields


def test_all_mistakes_are_named_at_once_under_the_keys_that_the_user_gives(tmp_path: Path) -> None:
    content = {
        "train": {"lr": -1, "no_such": 1},
        "generation": {"backend": "vlm_server", "max_new_tokens": 100},
        "grpo": {"learning_rate": 1, "clip_eps": 3, "training_steps": 5}
        | {"weight_transport": "collective"},
        "env_server": {"held_out": 2, "seq_len": 50, "teacher_api_key": "s3cret"},
    }
    with pytest.raises(KeysInvalid) as mistakes:
        job_keys(content, [], tmp_path)
    assert str(mistakes.value).splitlines() == [
        "generation.backend: expected one of vllm_server, sglang_server, local; got 'vlm_server', "
        "did you mean vllm_server?",
        "train.lr: expected a number, greater than 0; got '-1'",
        "train.no_such: no such key; conf/offline_grpo.yaml lists all keys",
        "grpo.learning_rate: no such option; did you mean train.lr?",
        "grpo.training_steps: train.iterations decides this option; set that key",
        "grpo.weight_transport: offline runs publish weights as files; omit this key",
        "grpo.clip_eps: expected a number, greater than 0 and less than 1; got '3'",
        "env_server.teacher_api_key: files of the run show every key, and this one is a secret; "
        "set the variable TEACHER_API_KEY instead",
        "env_server.held_out: expected a number, at least 0 and less than 1; got '2'",
        "generation.max_new_tokens: a prompt and 100 completion tokens exceed env_server.seq_len "
        "50; lower generation.max_new_tokens or raise env_server.seq_len",
    ]
    with pytest.raises(KeysInvalid, match=r"^model.train_id: no such directory: /no/such; name a"):
        job_keys({"model": {"train_id": "/no/such"}}, [], tmp_path)


def test_a_section_is_no_value_and_one_item_is_a_list(tmp_path: Path) -> None:
    with pytest.raises(KeysInvalid, match=r"^train: expected keys below it; got 3$"):
        job_keys({"train": 3}, [], tmp_path)
    assert job_keys({"eval": {"ids": 7}}, [], tmp_path).eval.ids == (7,)


def test_sections_of_an_option_are_its_value_and_keys_without_effect_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = {"task_args": {"level": 2}, "reward_weights": {"length": 0.5}, "testing": True}
    settings = environment_settings(OfflineKeys.model_validate({"env_server": task}))
    assert (settings.task_args, settings.reward_weights) == ({"level": 2}, {"length": 0.5})
    said = capsys.readouterr().err
    assert said == "ignored these keys, which have no effect: env_server.testing\n"


real_run = loop.run_offline


def scored(keys: OfflineKeys, _directory: Path, _screen: Any) -> RunResult:
    """Instead of a run: the learning rate is the score, and one of them fails."""
    if keys.train.lr == 2e-5 and keys.train.kl_coef == 0.1:
        raise RolloutsFail("the server ended")
    return RunResult(keys.train.lr * 1e4, keys.train.lr * 1e4, 0.1, 0.2)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchanged_process: None) -> None:  # noqa: ARG001
    """Commands run in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_offline_grpo.py"])
    monkeypatch.setattr(loop, "run_offline", scored)


def status(*words: str) -> object:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    return ended.value.code


@pytest.mark.usefixtures("commands")
def test_jobs_are_ranked_and_one_that_fails_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train.lr=[1e-5,2e-5]", "train.kl_coef=[0.05,0.1]"]
    assert status("-m", *words, f"hydra.sweep.dir={tmp_path}/sweep") == 1
    jobs = json.loads((tmp_path / "sweep/sweep.json").read_text())["jobs"]
    assert [job["error"] is None for job in jobs] == [True] * 3 + [False]
    scores = [job["score"] for job in jobs[:3]]
    assert scores == sorted(scores, reverse=True)
    assert jobs[0]["overrides"]["train.lr"] == 2e-5
    assert (tmp_path / "sweep/sweep.png").stat().st_size > 0
    said = capfd.readouterr()
    assert said.err.count("RolloutsFail: the server ended") == 1
    assert "HYDRA" not in said.out + said.err
    sweep.main([str(tmp_path / "sweep")])
    table = capfd.readouterr().out
    assert "train.kl_coef" in table
    assert table.count("failed: RolloutsFail: the server ended") == 1


@pytest.mark.usefixtures("commands")
def test_an_invalid_value_fails_its_job_alone(tmp_path: Path) -> None:
    assert status("-m", "train.lr=1e-5,-1", f"hydra.sweep.dir={tmp_path}/sweep") == 1
    jobs = json.loads((tmp_path / "sweep/sweep.json").read_text())["jobs"]
    assert [job["error"] is None for job in jobs] == [True, False]
    assert "train.lr" in jobs[1]["error"]


@pytest.mark.usefixtures("commands")
def test_a_single_run_ends_with_status_1_and_its_error_or_2_if_a_value_is_invalid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("train.lr=2e-5", "train.kl_coef=0.1", "hydra.run.dir=run") == 1
    assert "grpo-offline: RolloutsFail: the server ended" in capsys.readouterr().err
    monkeypatch.setattr(loop, "run_offline", real_run)
    monkeypatch.setattr(loop, "choose", lambda _: Sampling("local", "local"))
    assert [status(word, "hydra.run.dir=run") for word in ("train.lr=-1", "grpo.lr=1")] == [2, 2]


def test_several_ranks_need_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert status() == 2


def test_a_directory_without_jobs_is_no_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sweep.main([str(tmp_path)])
    assert "holds no jobs" in capsys.readouterr().err
