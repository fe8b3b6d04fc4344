"""The command lines and variables of the services of a local run: in each weight-sync mode, with
the options of single services, and with the limits of the model."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_core.settings import OptionsInvalid, load_settings, parsed, resolved_yaml
from grpo_core.settings.options import OF_TRL, options_of
from grpo_runs.__main__ import main
from grpo_runs.commands import whole_run
from grpo_runs.models import longest_sequence
from grpo_runs.modes import MODES
from grpo_runs.process.health import HealthProbe
from grpo_runs.process.ports import free_port
from grpo_runs.process.stack import Service, Stack, StopRequest
from grpo_runs.report.evaluations import EvaluationsFile
from grpo_runs.report.summary import WholeRun
from grpo_runs.run_directory import RunDirectory
from grpo_runs.services import MODULES, command_lines, services_of
from grpo_runs.settings.run import DEMO_FILE, DemoSettings, RunSettings
from grpo_runs.settings.views import Places
from tests.unit.runs.stand_ins import Shown

REDIS_URL = "redis://:a-secret@127.0.0.1:2/0"
ServicesOf = Callable[..., dict[str, Service]]


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HealthProbe]:
    monkeypatch.chdir(tmp_path)
    with HealthProbe() as probe:
        yield probe


@pytest.fixture
def services(probe: HealthProbe) -> ServicesOf:
    """The services of a run by name, at `places()` or others."""

    def found(settings: RunSettings, here: Places | None = None) -> dict[str, Service]:
        return {one.name: one for one in services_of(settings, here or places(), probe)}

    return found


def load(*words: str) -> RunSettings:
    return load_settings(DemoSettings, words, {}, below=DEMO_FILE)


def places(api_port: int = 1, *server_ports: int) -> Places:
    known = Places.of(load(), "m", run=RunDirectory(Path()), redis_url=REDIS_URL)
    run_api_url = f"http://127.0.0.1:{api_port}"
    return replace(known, run_api_url=run_api_url, server_ports=server_ports or [3])


def test_trainer_and_environment_start_once_they_can_connect(services: ServicesOf) -> None:
    with socket.create_server(("127.0.0.1", 0)) as run_api:
        server_port = free_port()
        here = places(run_api.getsockname()[1], server_port)
        found = services(load("--mode", "none"), here)
        assert not found["trainer"].may_start()
        assert found["environment"].may_start()
        with socket.create_server(("127.0.0.1", server_port)):
            assert found["trainer"].may_start()
    assert not found["environment"].may_start()


def test_each_process_serves_its_metrics_on_a_port_of_its_own(services: ServicesOf) -> None:
    tasks = ("arithmetic", "my.py:reward")
    found = services(load("--task", ",".join(tasks), "--metrics-port", "9100"))
    names = ("trainer", "environment-arithmetic", "environment-my")
    ports = [value_of("--metrics-port", [*found[name].command]) for name in names]
    assert ports == ["9100", "9101", "9102"]


def test_each_environment_with_a_curriculum_keeps_it_in_the_run(services: ServicesOf) -> None:
    tasks = ("arithmetic", "my.py:reward")
    found = services(load("--task", ",".join(tasks), "--curriculum", "learnable"))
    lines = [[*found[f"environment-{name}"].command] for name in ("arithmetic", "my")]
    kept = [value_of("--curriculum-dir", line) for line in lines]
    assert kept == ["curriculum/arithmetic", "curriculum/my"]
    plain = services(load("--curriculum", "uniform"))["environment"]
    assert "--curriculum-dir" not in plain.command


@pytest.mark.parametrize(("words", "given"), [([], False), (["--resume", "run"], True)])
def test_an_environment_of_a_resumed_run_knows_its_last_step(
    services: ServicesOf, words: list[str], given: bool
) -> None:
    environment = services(load(*words))["environment"]
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
    services: ServicesOf, words: list[str], limits: dict[str, str | None]
) -> None:
    found = [[*service.command] for service in services(load(*words)).values()]
    environments = {line[3]: line for line in found if line[2] == "grpo_env"}
    for task, limit in limits.items():
        assert value_of("--max-completion-tokens", environments[task]) == limit


def test_one_token_reaches_every_service_and_no_command_line(services: ServicesOf) -> None:
    settings = load("--run-api-token", "a-secret")
    clients = services(settings).values()
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
    probe: HealthProbe,
    words: list[str],
    flags: list[str],
) -> None:
    started: dict[str, Service] = {}

    def start(_stack: Stack, services: Sequence[Service], _screen: Shown) -> None:
        started.update({service.name: service for service in services})
        if "model" in started:
            Path(started["model"].command[-1]).write_text(str(tmp_path))

    monkeypatch.setattr(whole_run, "start_on_screen", start)
    run, socket_path = RunDirectory(tmp_path), tmp_path / "weights.sock"
    with StopRequest() as request, Stack(tmp_path / "logs", request) as stack:
        evaluations = EvaluationsFile(run.evaluations)
        whole = WholeRun(load(*words), run, Shown(), evaluations)
        whole_run.start_services(whole, probe, stack, socket_path)
    job = started["model"]
    assert job.command[1:-1] == ["-m", "grpo_tiny_model", *flags, "--path-file"]
    assert job.may_finish
    for name in ("vllm-server", "trainer", "environment"):
        assert value_of("--model", list(started[name].command)) == str(tmp_path)
        assert started[name].environment["HF_HUB_OFFLINE"] == "1"


def command_line(name: str, words: list[str]) -> list[str]:
    """Of one service, as `--dry-run` shows it."""
    lines = [shlex.split(line) for line in command_lines(load(*words))]
    (found,) = [line for line in lines if name in line]
    return found[found.index(name) + 1 :]


def flags(*names: str) -> set[str]:
    return {f"--{name}" for name in names}


def value_of(option: str, line: list[str]) -> str | None:
    return line[line.index(option) + 1] if option in line else None


@pytest.mark.parametrize(
    ("flag", "every"), [("--vllm-restart-interval", 4), ("--adapter-sync-interval", 5)]
)
def test_both_names_of_the_interval_count_in_lora_only(flag: str, every: int) -> None:
    words = ["--mode", "lora_only", flag, str(every)]
    assert value_of(flag, command_line("grpo_trainer", words)) == str(every)
    assert load(*words).publish_every_steps == every
    assert load(*words).resolved()[flag.removeprefix("--").replace("-", "_")] == every


def test_a_configuration_of_lora_restart_publishes_every_step_in_lora_only(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    settings = load("--mode", "lora_restart")
    file.write_text(resolved_yaml(settings.command, settings.resolved()))
    assert load("--config", str(file)).publish_every_steps == 10
    assert load("--config", str(file), "--mode", "lora_only").publish_every_steps == 1


def test_an_interval_of_the_command_line_wins_over_that_of_a_file_under_its_other_name(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("adapter-sync-interval: 3\n")
    words = ["--config", str(file), "--mode", "lora_only", "--vllm-restart-interval", "4"]
    assert load(*words).publish_every_steps == 4


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
    words += " --compute-threads 3"
    monkeypatch.setattr(sys, "argv", ["grpo-demo", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "hunter" not in shown
    assert shown.count("OMP_NUM_THREADS=3 ") == len(("server", "trainer"))
    for name in ("grpo_api", *MODULES.values()):
        assert f" -m {name} " in shown.partition("# Command lines of the services")[2]


@pytest.mark.parametrize(
    ("words", "device", "share"),
    [
        ("--device cuda", "cuda:2", "0.9"),
        ("--device cuda:0", "cuda:0", "0.4"),
        ("--device cuda --gpu-memory-utilization 0.5", "cuda:2", "0.5"),
        ("--device cuda --objective distill --teacher-model x", "cuda:2", "0.4"),
        ("--device cpu", "cpu", None),
    ],
)
def test_the_trainer_takes_the_gpu_after_those_of_the_workers(
    words: str, device: str, share: str | None
) -> None:
    given = ["--mode", "none", "--server.tensor-parallel-size", "2", *words.split()]
    lines = [shlex.split(line) for line in command_lines(load(*given))]
    servers = [line for line in lines if "grpo_vllm" in line]
    assert len(servers) == 1 + ("--teacher-model" in given)
    for server in servers:
        assert value_of("--tensor-parallel-size", server) == "2"
        assert value_of("--gpu-memory-utilization", server) == share
    (trainer,) = [line for line in lines if "grpo_trainer" in line]
    assert value_of("--device", trainer) == device


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, "1,2,3"), ("4,5,6,7", "5,6,7")], ids=["all", "some"]
)
def test_several_ranks_take_the_gpus_after_those_of_the_server(
    visible: str | None, gpus: str, services: ServicesOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = services(load("--mode", "none", "--device", "cuda", "--trainer.ranks", "3"))
    trainer, server = found["trainer"], found["vllm-server"]
    assert value_of("--ranks", [*trainer.command]) == "3"
    assert trainer.environment["CUDA_VISIBLE_DEVICES"] == gpus
    assert "CUDA_VISIBLE_DEVICES" not in server.environment
    assert value_of("--gpu-memory-utilization", [*server.command]) == "0.9"


def test_several_ranks_share_the_threads_and_pass_on_where_the_hosts_meet(
    services: ServicesOf, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {ranks: 2, nodes: 2, rendezvous: 'head:1'}\n")
    settings = load("--config", str(file), "--mode", "none", "--compute-threads", "5")
    trainer = services(settings)["trainer"]
    given = {name: value_of(f"--{name}", [*trainer.command]) for name in ("nodes", "rendezvous")}
    assert given == {"nodes": "2", "rendezvous": "head:1"}
    assert trainer.environment["OMP_NUM_THREADS"] == "2"
    assert trainer.role.endswith("on 4 ranks")


def test_beside_a_run_api_too_the_trainer_takes_the_gpu_after_those_of_the_workers() -> None:
    words = ["--model", "m", "--max-model-len", "64", "--mode", "none", "--device", "cuda"]
    words += ["--server-flags=--tensor-parallel-size 2"]
    server, trainer = command_lines(load_settings(RunSettings, words, {}))
    assert "--gpu-memory-utilization 0.9" in server
    assert "--device cuda:2" in trainer


def test_several_servers_have_names_ports_and_their_share_of_the_threads(
    services: ServicesOf,
) -> None:
    settings = load("--mode", "none", "--servers", "3", "--compute-threads", "7")
    in_two = ("--servers", "2", "--server.tensor-parallel-size", "2")
    assert load("--mode", "none", *in_two, "--compute-threads", "7").server_threads == 1
    found = [*services(settings, places(1, 11, 12, 13)).values()]
    servers = [service for service in found if service.name.startswith("server-")]
    lines = [[*server.command] for server in servers]
    assert [server.name for server in servers] == ["server-0", "server-1", "server-2"]
    assert [value_of("--server-name", line) for line in lines] == [s.name for s in servers]
    assert [value_of("--port", line) for line in lines] == ["11", "12", "13"]
    assert {server.environment["OMP_NUM_THREADS"] for server in servers} == {"2"}
    trainer, environment = found[-2:]
    assert value_of("--num-inference-nodes", [*trainer.command]) == "3"
    assert trainer.environment["OMP_NUM_THREADS"] == "7"
    assert trainer.environment["MASTER_ADDR"] == "127.0.0.1"
    assert value_of("--inference-url", [*environment.command]) == ",".join(
        f"http://127.0.0.1:{port}" for port in (11, 12, 13)
    )


def test_servers_beside_a_run_api_have_the_ports_after_the_first() -> None:
    words = ["--model", "m", "--mode", "none", "--servers", "2", "--max-model-len", "64"]
    words += ["--port", "9001", "--health-port", "9101"]
    settings = load_settings(RunSettings, words, {})
    lines = [shlex.split(line) for line in command_lines(settings)]
    assert [value_of("--port", line) for line in lines[:2]] == ["9001", "9002"]
    assert [value_of("--health-port", line) for line in lines[:2]] == ["9101", "9102"]
    assert value_of("--num-inference-nodes", lines[2]) == "2"
    further = load_settings(RunSettings, [*words, "--num-inference-nodes", "4"], {})
    trainer = shlex.split(command_lines(further)[-1])
    assert value_of("--num-inference-nodes", trainer) == "4", "two more run on other hosts"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--mode shared_vllm --servers 2", r"--servers: 2: in mode shared_vllm .* --mode none"),
        ("--mode none --servers 2 --device cuda", "on GPUs, grpo-demo starts one server"),
        ("--mode shared_vllm --server.tensor-parallel-size 2", "2 workers .* one; omit --tensor"),
        ("--mode shared_vllm --server-flags=-pp=3", "3 workers .* choose mode none, lora_only"),
        ("--mode none --num-inference-nodes 2", "write --servers 2"),
        ("--mode none --servers 0", "--servers"),
    ],
)
def test_several_servers_that_cannot_be_are_refused_by_name(words: str, told: str) -> None:
    with pytest.raises(OptionsInvalid, match=told) as invalid:
        parsed(DemoSettings, words.split(), {}, below=DEMO_FILE)
    assert len(invalid.value.lines) == 1


OF_FILES = {"--no-share-weights", "--weights-dir"}
TAKES_ADAPTERS = OF_FILES | {"--enable-lora", "--max-loras", "--max-lora-rank"}
IN_EVERY_MODE = flags(
    *("share-weights", "no-share-weights", "weights-dir", "weights-socket"),
    *("bridge-config-path", "enable-lora", "max-loras", "max-lora-rank", "run-id"),
    *("lora-target-modules", "vllm-restart-interval"),
)


@pytest.mark.parametrize(
    ("mode", "server", "trainer"),
    [
        (
            "shared_vllm",
            {"--share-weights", "--weights-socket", "--bridge-config-path"},
            {"--weights-socket"},
        ),
        ("lora_only", TAKES_ADAPTERS, {"--run-id", "--lora-target-modules"}),
        (
            "lora_restart",
            TAKES_ADAPTERS,
            {"--run-id", "--lora-target-modules", "--vllm-restart-interval"},
        ),
        ("none", OF_FILES, {"--run-id", "--vllm-restart-interval"}),
    ],
)
def test_each_mode_tells_server_and_trainer_what_it_needs_and_no_secret(
    services: ServicesOf, mode: str, server: set[str], trainer: set[str]
) -> None:
    found = services(load("--mode", mode))
    pair = (found["vllm-server"], found["trainer"])
    for service, expected in zip(pair, (server | {"--run-id"}, trainer), strict=True):
        assert IN_EVERY_MODE.intersection(service.command) == expected
        assert service.environment["REDIS_URL"] == REDIS_URL
        assert not [word for word in service.command if "secret" in word]


def test_rank_cadence_and_directory_are_the_same_on_both_sides(services: ServicesOf) -> None:
    words = "--mode lora_restart --lora-r 20 --vllm-restart-interval 7"
    found = services(load(*words.split(), "--lora-target-modules", "q_proj", "v_proj"))
    server, trainer = ([*found[name].command] for name in ("vllm-server", "trainer"))
    assert value_of("--max-lora-rank", server) == "32"
    assert value_of("--lora-r", trainer) == "20"
    assert value_of("--vllm-restart-interval", trainer) == "7"
    assert value_of("--weights-dir", server) == f"{Path.cwd()}/checkpoints/served_weights"
    assert value_of("--lora-target-modules", trainer) == "q_proj,v_proj"


FILE = """
model: tiny
task: {name: "my.py:reward", columns: {prompt: question}, held-out: 0.2}
sampling: {temperature: 0.7}
optim: {lr: 1.0e-3, adam_beta2: 0.95}
server: {block-size: 32, enable-prefix-caching: true}
queue: {max-staleness: 4, max-queued-groups: 50}
"""


def test_a_file_of_sections_reaches_the_services_that_read_them(
    services: ServicesOf, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    settings = load_settings(RunSettings, ["--config", "run.yaml", "--optim.lr", "2e-3"], {})
    run_api, server, trainer, env = ([*service.command] for service in services(settings).values())
    assert value_of("--max-queued-groups", run_api) == "50"
    assert server[-2:] == ["--block-size=32", "--enable-prefix-caching"]
    assert [value_of(f"--{name}", trainer) for name in ("lr", "adam-beta2", "max-staleness")] == [
        *("0.002", "0.95", "4")
    ]
    assert env[3:5] == ["my.py:reward", "serve"]
    assert value_of("--columns", env) == '{"prompt": "question"}'
    assert [value_of(f"--{name}", env) for name in ("held-out", "temperature")] == ["0.2", "0.7"]


def test_a_configuration_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: m\nrun:\n  model-deadline-s: 600.0\nqueue:\n  redis-appendfsync: no\n")
    assert parsed(RunSettings, ["--config", str(file)], {}).model == "m"


def test_the_id_of_a_run_follows_from_the_port_also_if_it_is_empty() -> None:
    words = ["--model", "m", "--run-id", "", "--port", "9100"]
    assert parsed(RunSettings, words, {}).run_id == ""


def test_variables_that_a_service_reads_itself_count(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "m", "--host", "0.0.0.0", "--redis-url", REDIS_URL]
    with pytest.raises(OptionsInvalid, match="needs --control-port"):
        parsed(RunSettings, words, {})
    monkeypatch.setenv("GRPO_VLLM_CONTROL_PORT", "9002")
    parsed(RunSettings, words, {})


def test_every_mistake_of_a_file_is_named_with_its_line_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "tiny"\ntask = "arithmetic"\n[optim]\nlr = -1\nlearning_rat = 3\n'
        '[sampling]\ntemperature = "warm"\nlr = 1\ngroup-size = 5\n[server]\nport = 3\n'
        "[queue]\nmax-staleness = 0\n[weights]\nmode = 'none'\n[trainer]\nmode = 'lora_only'\n"
    )
    with pytest.raises(OptionsInvalid) as invalid:
        parsed(RunSettings, ["--config", str(file)], {})
    told = [line.removeprefix(f"{file}:") for line in invalid.value.lines]
    begins = [
        "4: optim.lr: expected a number, greater than 0; got '-1'",
        "5: optim.learning_rat: no such option",
        "7: sampling.temperature: expected a number, greater than 0; got 'warm'",
        "8: sampling.lr: no such option; did you mean optim.lr?",
        "9: sampling.group-size: 5 does not divide the 128 sequences of a step",
        "11: server.port: grpo-run sets this option itself; omit it",
        f"17: trainer.mode: {file}:15: weights.mode is the same option; omit one of them",
    ]
    assert [line[: len(begin)] for line, begin in zip(told, begins, strict=True)] == begins


def test_names_of_trl_and_of_misspelt_sections_have_a_hint_and_cause_no_second_mistake(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: tiny\ntasks: {name: arithmetic}\nnum_generations: 8\n"
        "optim: {learning_rate: 1e-5}\nbeta: 0.1\nkl-in: loss\nrun: {report: true}\n"
    )
    with pytest.raises(OptionsInvalid) as invalid:
        parsed(RunSettings, ["--config", str(file)], {})
    assert [line.removeprefix(f"{file}:") for line in invalid.value.lines] == [
        "2: tasks.name: no such option; did you mean task.name?",
        "3: num_generations: no such option; did you mean group-size?",
        "4: optim.learning_rate: no such option; did you mean optim.lr?",
        "5: beta: no such option; did you mean kl-coef?",
    ]


def test_every_name_of_trl_with_a_hint_names_an_option() -> None:
    assert {*OF_TRL.values()} <= {option.name for option in options_of(RunSettings).values()}


def test_a_key_that_stands_twice_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: tiny\noptim: {lr: 1}\noptim: {steps: 1}\n")
    with pytest.raises(OptionsInvalid, match="line 3: optim stands in line 2 too"):
        parsed(RunSettings, ["--config", str(tmp_path / "run.yaml")], {})


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


@pytest.mark.parametrize(("named", "model"), [("tiny", "m"), (".", ".")])
def test_a_named_teacher_gets_a_server_of_its_own_that_the_environment_asks(
    services: ServicesOf, named: str, model: str
) -> None:
    """The model that the run makes is that of `places`."""
    settings = load(
        *("--objective", "distill", "--teacher.model", named, "--run-api-token", "a-secret")
    )
    here = replace(places(), teacher_port=7)
    found = services(settings, here)
    teacher, environment = (found[name] for name in ("teacher", "environment"))
    assert value_of("--model", [*teacher.command]) == model
    assert value_of("--port", [*teacher.command]) == "7"
    assert teacher.environment["REDIS_URL"] == "none"
    assert value_of("--teacher-url", [*environment.command]) == "http://127.0.0.1:7"
    assert value_of("--teacher-model", [*environment.command]) == model
    assert environment.environment["TEACHER_API_KEY"] == "a-secret"
    elsewhere = load(
        *("--distill-coef", "1", "--teacher-model", named, "--teacher.url", "http://host:1")
    )
    assert [*services(elsewhere)] == ["run-api", "vllm-server", "trainer", "environment"]
