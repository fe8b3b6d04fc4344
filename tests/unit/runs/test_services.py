"""The command lines and variables of the services of a local run: in each weight-sync mode, with
the options of single services, and with the limits of the model."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_core.settings import load_settings
from grpo_runs.__main__ import main
from grpo_runs.commands import demo
from grpo_runs.models import longest_sequence
from grpo_runs.modes import MODES, HandOff
from grpo_runs.process.health import HealthProbe
from grpo_runs.process.ports import free_port
from grpo_runs.process.stack import Service, Stack, StopRequest
from grpo_runs.run_directory import RunDirectory
from grpo_runs.service_options import (
    MODULES,
    options_by_service,
    section,
    service_words,
    words_of_sections,
)
from grpo_runs.services import ServiceFactory, command_lines
from grpo_runs.settings import DemoSettings
from tests.unit.runs.stand_ins import Shown

REDIS_URL = "redis://:a-secret@127.0.0.1:2/0"
FactoryOf = Callable[[DemoSettings], ServiceFactory]


@pytest.fixture
def factory_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FactoryOf]:
    monkeypatch.chdir(tmp_path)
    with HealthProbe() as probe:
        yield lambda settings: ServiceFactory(settings, RunDirectory(tmp_path), probe)


def hand_off_of(settings: DemoSettings) -> HandOff:
    run = RunDirectory(Path())
    return settings.hand_off(REDIS_URL, run, Path("weights.sock"))


def test_trainer_and_environment_start_once_they_can_connect(factory_of: FactoryOf) -> None:
    settings = load_settings(DemoSettings, ["--mode", "none"])
    with socket.create_server(("127.0.0.1", 0)) as run_api:
        factory, api_port = factory_of(settings), run_api.getsockname()[1]
        server_port = free_port()
        trainer = factory.trainer("m", api_port, server_port, hand_off_of(settings))
        assert not trainer.may_start()
        assert factory.environment("arithmetic", "m", api_port, server_port).may_start()
        with socket.create_server(("127.0.0.1", server_port)):
            assert trainer.may_start()
        assert not factory.environment("arithmetic", "m", server_port, api_port).may_start()


@pytest.mark.parametrize(("words", "given"), [([], False), (["--resume", "run"], True)])
def test_an_environment_of_a_resumed_run_knows_its_last_step(
    factory_of: FactoryOf, words: list[str], given: bool
) -> None:
    factory = factory_of(load_settings(DemoSettings, words))
    environment = factory.environment("arithmetic", "m", 1, 2)
    assert ("--steps" in environment.command) is given


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        (["--task", "arithmetic,gsm8k", "--data", "d"], {"arithmetic": "32", "gsm8k": "32"}),
        (["--task", "gsm8k,my.py:reward", "--data", "d"], {"gsm8k": "32", "my.py:reward": None}),
        (["--task", "my.py:reward", "--max-completion-tokens", "9"], {"my.py:reward": "9"}),
        (["--task", "gsm8k,math", "--data", "d", "--model", "m"], {"gsm8k": "256", "math": None}),
    ],
)
def test_each_task_has_its_own_longest_completion(
    factory_of: FactoryOf, words: list[str], limits: dict[str, str | None]
) -> None:
    factory = factory_of(
        DemoSettings.model_validate(
            dict(zip([w[2:].replace("-", "_") for w in words[::2]], words[1::2], strict=True))
        )
    )
    for task, limit in limits.items():
        command = [*factory.environment(task, "m", 1, 2).command]
        assert value_of("--max-completion-tokens", command) == limit


def test_one_token_reaches_every_service_and_no_command_line(factory_of: FactoryOf) -> None:
    settings = load_settings(DemoSettings, ["--run-api-token", "a-secret"])
    factory, hand_off = factory_of(settings), hand_off_of(settings)
    clients = [
        factory.run_api(1, hand_off),
        factory.vllm_server(3, "m", hand_off),
        factory.trainer("m", 1, 3, hand_off),
        factory.environment("arithmetic", "m", 1, 3),
    ]
    for variable in ("RUN_API_TOKEN", "VLLM_API_KEY"):
        assert [service.environment[variable] for service in clients] == ["a-secret"] * 4
    assert not [word for service in clients for word in service.command if "secret" in word]
    assert "a-secret" not in repr(settings)


@pytest.mark.parametrize(
    ("words", "flags"), [([], []), (["--model", "smollm2"], ["--smollm2"])], ids=["tiny", "smollm2"]
)
def test_a_model_that_this_project_makes_is_made_by_a_job_and_every_service_gets_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    factory_of: FactoryOf,
    words: list[str],
    flags: list[str],
) -> None:
    started: dict[str, Service] = {}

    def start(_stack: Stack, services: Sequence[Service], _screen: Shown) -> None:
        started.update({service.name: service for service in services})
        if "model" in started:
            Path(started["model"].command[-1]).write_text(str(tmp_path))

    monkeypatch.setattr(demo, "start_on_screen", start)
    factory = factory_of(load_settings(DemoSettings, words))
    with StopRequest() as request, Stack(tmp_path / "logs", request) as stack:
        demo.start_services(factory, stack, Shown(), tmp_path / "weights.sock")
    job = started["model"]
    assert job.command[1:-1] == ["-m", "grpo_tiny_model", *flags, "--path-file"]
    assert job.may_finish
    for name in ("vllm-server", "trainer", "environment"):
        assert value_of("--model", list(started[name].command)) == str(tmp_path)
        assert started[name].environment["HF_HUB_OFFLINE"] == "1"


def command_line(name: str, words: list[str]) -> list[str]:
    """Of one service, as `--dry-run` shows it."""
    lines = [shlex.split(line) for line in command_lines(load_settings(DemoSettings, words))]
    (found,) = [line for line in lines if line[2] == name]
    return found[3:]


def value_of(option: str, line: list[str]) -> str | None:
    return line[line.index(option) + 1] if option in line else None


@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_the_server_computes_in_bf16_with_graphs_and_takes_its_share_of_the_memory(
    mode: str,
) -> None:
    words = ["--device", "cuda", "--model", "Qwen/Qwen2.5-3B-Instruct", "--mode", mode]
    server, trainer = command_line("grpo_vllm", words), command_line("grpo_trainer", words)
    assert value_of("--gpu-memory-utilization", server) == "0.4"
    assert "--enforce-eager" not in server
    assert "--kv-cache-memory-bytes" not in server
    assert [value_of("--dtype", line) for line in (server, trainer)] == ["bfloat16"] * 2
    assert value_of("--device", trainer) == "cuda"
    assert "--optimizer" not in trainer  # the trainer's default on a GPU


@pytest.mark.parametrize(
    ("words", "cache_mib"),
    [
        ("--device cpu", 64),
        ("--device cuda:1 --eager --kv-cache-mib 2 --dtype float32", 2),
    ],
)
def test_a_cpu_has_an_eager_server_with_a_small_cache_and_given_options_count(
    words: str, cache_mib: int
) -> None:
    server = command_line("grpo_vllm", words.split())
    assert "--enforce-eager" in server
    assert value_of("--kv-cache-memory-bytes", server) == str(cache_mib * 2**20)
    assert value_of("--dtype", server) == "float32"
    on_gpu = "cuda" in words
    assert ("--gpu-memory-utilization" in server) is on_gpu
    trainer = command_line("grpo_trainer", words.split())
    assert value_of("--optimizer", trainer) == (None if on_gpu else "adamw")


def test_a_dry_run_prints_the_command_lines_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--device cuda --run-api-token hunter2 --server.hf-token hunter3 --dry-run"
    monkeypatch.setattr(sys, "argv", ["grpo-demo", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "hunter" not in shown
    for name in ("grpo_api", *MODULES.values()):
        assert f" -m {name} " in shown.partition("# Command lines of the services")[2]


OF_FILES = {"--no-share-weights", "--weights-dir"}
TAKES_ADAPTERS = OF_FILES | {"--enable-lora", "--max-loras", "--max-lora-rank"}
TRAINS_ADAPTERS = {
    *("--run-id", "--lora-r", "--lora-alpha", "--lora-dropout", "--lora-target-modules"),
}


def flags(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


@pytest.mark.parametrize(
    ("mode", "server", "trainer"),
    [
        (
            "shared_vllm",
            {"--share-weights", "--weights-socket", "--bridge-config-path"},
            {"--weights-socket"},
        ),
        ("lora_only", TAKES_ADAPTERS, TRAINS_ADAPTERS | {"--adapter-sync-interval"}),
        ("lora_restart", TAKES_ADAPTERS, TRAINS_ADAPTERS | {"--vllm-restart-interval"}),
        ("none", OF_FILES, {"--run-id", "--vllm-restart-interval"}),
    ],
)
def test_each_mode_tells_server_and_trainer_what_it_needs_and_no_secret(
    mode: str, server: set[str], trainer: set[str]
) -> None:
    chosen = hand_off_of(load_settings(DemoSettings, ["--mode", mode]))
    assert flags(chosen.server_flags()) == {"--run-id"} | server
    assert flags(chosen.trainer_flags()) == {"--mode", "--save-path"} | trainer
    words = chosen.server_flags() + chosen.trainer_flags()
    assert not [word for word in words if "secret" in word]
    assert chosen.environment() == {"REDIS_URL": REDIS_URL}


def test_rank_cadence_and_directory_are_the_same_on_both_sides() -> None:
    words = "--mode lora_restart --lora-r 20 --vllm-restart-interval 7"
    modules = ["--lora-target-modules", "q_proj", "v_proj"]
    chosen = hand_off_of(load_settings(DemoSettings, [*words.split(), *modules]))
    server, trainer = chosen.server_flags(), chosen.trainer_flags()
    assert server[server.index("--max-lora-rank") + 1] == "32"
    assert trainer[trainer.index("--lora-r") + 1] == "20"
    assert trainer[trainer.index("--vllm-restart-interval") + 1] == "7"
    assert server[server.index("--weights-dir") + 1] == f"{Path.cwd()}/checkpoints/served_weights"
    assert trainer[-3:] == modules


WORDS = [
    *("--trainer.max_staleness", "4", "--server.enforce-eager", "--env.temperature=0.7"),
    *("--trainer.lora-target-modules", "q_proj", "v_proj", "--trainer.vllm-flags=--seed 3"),
]


def test_the_last_value_of_an_option_counts() -> None:
    options = options_by_service(["--env.seed", "1", "--env.steps", "2", "--env.seed=3"])
    assert service_words(options["env"]) == ["--steps=2", "--seed=3"]


def test_sections_of_a_file_mean_the_same() -> None:
    options = options_by_service(WORDS)
    content = {service: section(found) for service, found in options.items()} | {"steps": 3}
    words, rest = words_of_sections(content)
    assert rest == {"steps": 3}
    assert options_by_service(words) == options
    dotted, _ = words_of_sections({"env.seed": 3, "server.x": False, "trainer.y": None})
    assert dotted == ["--env.seed=3", "--server.no-x"]
    with pytest.raises(ValueError, match="trainer: expected a section with one option per line"):
        words_of_sections({"trainer": 3})


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({}, None),
        (None, None),
    ],
)
def test_the_limit_of_a_model_is_read_from_its_configuration(
    config: dict[str, Any] | None, limit: int | None, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest_sequence(str(tmp_path)) == limit
    assert longest_sequence("smollm2") == 8192, "known before it is made"
