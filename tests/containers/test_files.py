"""Dockerfiles, scripts and Compose files, as their own linters and Compose see them."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers.stack import ROOT, Done, run

SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "RUN_API_TOKEN")
MODES = ("shared_vllm", "lora_only", "lora_restart", "none", "single")
DOCKERFILES = sorted([*ROOT.glob("services/*/Dockerfile"), *ROOT.glob("containers/*/Dockerfile")])
SCRIPTS = sorted([*ROOT.glob("containers/*.sh"), *ROOT.glob("tests/**/*.sh")])


def test_the_linters_find_nothing() -> None:
    beside_python = Path(sys.executable).parent
    rules = ("--config", ROOT / "containers" / "hadolint.yaml")
    dockerfiles = ("hadolint", *rules, *DOCKERFILES)
    for linter, *words in (dockerfiles, ("shellcheck", "-Swarning", *SCRIPTS)):
        done = run([str(beside_python / linter), *map(str, words)])
        assert done.returncode == 0, done.stdout


@functools.cache
def configuration(mode: str, **settings: str) -> Done:
    """What Compose makes of the files for a host that has set nothing else."""
    kept = ("PATH", "HOME", "DOCKER_CONFIG")
    clean = {name: os.environ[name] for name in kept if name in os.environ}
    command = ["docker", "compose", "--env-file", "/dev/null", "--profile", mode]
    return run([*command, "config", "--format", "json"], clean | settings)


def services(mode: str, **settings: str) -> dict[str, Any]:
    done = configuration(mode, **settings)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("mode", MODES)
def test_every_profile_is_complete_without_a_setting(mode: str, device: str) -> None:
    found = services(mode, STACK_DEVICE=device)
    chosen = {name for name in found if name.startswith(("trainer", "vllm-server", "single"))}
    assert len(chosen) == (1 if mode == "single" else 2)
    for name in chosen:
        devices = found[name].get("deploy", {}).get("resources", {}).get("reservations", {})
        assert bool(devices) == (device == "gpu")
        assert found[name].get("runtime") == ("nvidia" if device == "gpu" else None)


@pytest.mark.parametrize("mode", [*MODES, "monitoring"])
def test_everybody_is_confined_and_only_loopback_is_published(mode: str) -> None:
    for name, service in services(mode, STACK_DEVICE="cpu").items():
        assert service["user"] == "1000:1000", name
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert not {"cap_add", "privileged"} & set(service), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["logging"]["options"]["max-size"], name
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ())), name
        assert "docker.sock" not in json.dumps(service), name


def test_kernels_that_are_compiled_at_run_time_can_be_loaded_and_their_caches_named() -> None:
    """Triton loads them from below HOME; torch asks for the user, whom the base may not know."""
    stack = yaml.safe_load((ROOT / "containers" / "stack.yml").read_text())["services"].items()
    computing = {name: s for name, s in stack if name.startswith(("trainer", "vllm", "single"))}
    assert len(computing) == 9
    for name, service in computing.items():
        assert service["tmpfs"] == ["/tmp:mode=1777,exec"], name
    stages = (ROOT / "containers" / "torch" / "Dockerfile").read_text().split("\nFROM ")
    for image in ("trainer", "vllm-server", "single"):
        (stage,) = [text for text in stages if text.partition("\n")[0].endswith(f" AS {image}")]
        assert "\nENV HOME=/tmp USER=grpo LOGNAME=grpo " in stage


@pytest.mark.parametrize("mode", ["lora_only", "lora_restart", "none"])
def test_servers_of_a_mode_with_files_share_a_range_of_ports(mode: str) -> None:
    name = f"vllm-server-{mode.replace('_', '-')}"
    for settings, replicas, ports in (({}, 1, "9001"), ({"REPLICAS": "3"}, 3, "9001-9032")):
        server = services(mode, **settings)[name]
        assert server["deploy"]["replicas"] == replicas
        assert [port["published"] for port in server["ports"]] == [ports]
    trainer = f"trainer-{mode.replace('_', '-')}"
    assert services(mode)[trainer]["environment"]["MASTER_ADDR"] == trainer


def test_the_shared_mode_runs_in_the_namespaces_of_a_sandbox() -> None:
    found = services("shared_vllm", STACK_DEVICE="gpu", STACK_IPC="service:sandbox")
    for name in ("vllm-server-shared", "trainer-shared"):
        assert (found[name]["pid"], found[name]["ipc"]) == ("service:sandbox",) * 2


@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_keys_are_files_for_those_who_need_them(mode: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("in the file")
    settings = {f"{name}_FILE": str(tmp_path / "token") for name in SECRETS}
    settings |= dict.fromkeys(SECRETS, "in the shell")
    shown = configuration(mode, **settings).stdout
    assert not {"in the file", "in the shell"} & {*re.findall("in the [a-z]+", shown)}
    holders: dict[str, set[str]] = {}
    for name, service in services(mode, **settings).items():
        for secret in service.get("secrets", []):
            holders.setdefault(secret["source"], set()).add(name)
    suffix = mode.removesuffix("_vllm").replace("_", "-")
    pair = {"single"} if mode == "single" else {f"vllm-server-{suffix}", f"trainer-{suffix}"}
    assert holders == {
        "hf_token": {"model"},
        "wandb_api_key": {f"trainer-{suffix}"} & pair or pair,
        "run_api_token": {"run-api", f"environment-{suffix}"} | pair,
    }


def test_a_token_that_is_no_file_starts_nothing() -> None:
    """Rather than a run without one."""
    told = json.loads(configuration("none", RUN_API_TOKEN="in the shell").stdout)
    file = told["secrets"]["run_api_token"]["file"]
    assert file.startswith("/set RUN_API_TOKEN_FILE instead")
    assert not Path(file).exists()
    check = ["bash", "containers/check_host.sh", "none", "none"]
    for variable in ("RUN_API_TOKEN", "RUN_API_TOKEN_FILE"):
        done = run(check, os.environ | {variable: "in the shell"})
        is_refused = variable == "RUN_API_TOKEN"
        assert done.returncode == (1 if is_refused else 0), done.stderr
        assert ("set RUN_API_TOKEN_FILE to the path of this file" in done.stderr) == is_refused


def test_workers_on_gpus_leave_one_to_the_trainer_and_share_no_memory_with_it() -> None:
    for own in ({}, {"TRAINER_GPU_ID": "2"}):
        found = services("none", STACK_DEVICE="gpu", GPU_ID="0,1", **own)
        (gpus, trainers) = (
            found[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
            for name in ("vllm-server-none", "trainer-none")
        )
        assert (gpus, trainers) == (["0,1"], ["2"] if own else ["0,1"])
    for mode in ("none", "shared_vllm"):
        for workers in "12":
            flags = {"VLLM_FLAGS": f"--seed 1 --tensor-parallel-size {workers}"}
            done = run(["bash", "containers/check_host.sh", mode, mode], os.environ | flags)
            is_refused = (mode, workers) == ("shared_vllm", "2")
            assert ("remove --tensor-parallel-size" in done.stderr) == is_refused


@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_by_cdi_needs_its_name_and_no_runtime(mode: str) -> None:
    wanted = {"GPU_DRIVER": "cdi", "GPU_ID": "1"}
    found = services(mode, STACK_DEVICE="gpu", **wanted)
    computing = [s for n, s in found.items() if n.startswith(("trainer", "vllm-server", "single"))]
    assert computing
    for service in computing:
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["device_ids"]) == ("cdi", ["nvidia.com/gpu=1"])
        assert "runtime" not in service
    assert [*services(mode, **wanted).values()] == [*services(mode, GPU_ID="1").values()]  # a CPU


@pytest.mark.parametrize("mode", ["none", "shared_vllm"])
def test_several_ranks_need_a_mode_whose_weights_travel_as_files(mode: str) -> None:
    trainer = "trainer-none" if mode == "none" else "trainer-shared"
    assert services(mode, RANKS="2")[trainer]["environment"]["GRPO_RANKS"] == "2"
    done = run(["bash", "containers/check_host.sh", mode, mode], os.environ | {"RANKS": "2"})
    is_refused = mode == "shared_vllm"
    assert ("RANKS=2: mode shared_vllm needs one trainer process" in done.stderr) == is_refused
    assert done.returncode == int(is_refused)


DOCKER = """#!/bin/sh
case "$*" in
  *Runtimes*) echo "map[$RUNTIMES runc:{runc [] <nil>}]" ;;
  *DiscoveredDevices*) echo "[$DEVICES]" ;;
esac
"""


@pytest.mark.parametrize("runtimes", ["nvidia:{nvidia-container-runtime [] <nil>}", ""])
@pytest.mark.parametrize("devices", ["{cdi nvidia.com/gpu=0} {cdi nvidia.com/gpu=all}", ""])
def test_gpus_are_given_in_a_way_that_the_host_has(
    runtimes: str, devices: str, tmp_path: Path
) -> None:
    for name, text in (("docker", DOCKER), ("nvidia-smi", "#!/bin/sh\necho GPU 0: H100\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    host = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUNTIMES": runtimes, "DEVICES": devices}
    assert run(["bash", "containers/write_env.sh", str(tmp_path / "env")], host).returncode == 0
    written = dict(
        re.findall("(?m)^(STACK_DEVICE|GPU_DRIVER)=(.*)", (tmp_path / "env").read_text())
    )
    driver = "nvidia" if runtimes else "cdi"
    on_gpu = {"STACK_DEVICE": "gpu", "GPU_DRIVER": driver}
    assert written == (on_gpu if runtimes or devices else {"STACK_DEVICE": "cpu"})
    for driver, offered in (("nvidia", runtimes), ("cdi", devices), ("cuda", "")):
        settings = host | {"STACK_DEVICE": "gpu", "GPU_DRIVER": driver}
        done = run(["bash", "containers/check_host.sh", "none", "none"], settings)
        assert done.returncode == (0 if offered else 1), done.stderr
        assert (f"GPU_DRIVER={driver}" in done.stderr) == (not offered)


def test_the_example_lists_every_setting_and_no_other() -> None:
    example = (ROOT / "containers" / "env.example").read_text()
    documented = set(re.findall(r"(?m)^#([A-Z]\w*)=", example))
    files = [ROOT / "docker-compose.yml", *ROOT.glob("containers/*.yml")]
    used = {name for file in files for name in re.findall(r"\$\{([A-Z_]+)", file.read_text())}
    assert documented == used - {"RUN_API_TOKEN"}  # which is refused
