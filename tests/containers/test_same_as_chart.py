"""Compose and the chart start every service with the same command and the same variables.

DIFFERENT is the table of all differences. Anything else that one of them adds, loses or changes is
found here.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from tests.chart.rendering import containers, pod_templates, template
from tests.containers.test_files import MODES, services

SERVER, TRAINER, RUN_API = "vllm-server", "trainer", "run-api"
ENVIRONMENT, REDIS = "environment", "redis"

TOKEN_FILES = (
    (RUN_API, "RUN_API_TOKEN_FILE"),
    (SERVER, "VLLM_API_KEY_FILE"),
    (TRAINER, "RUN_API_TOKEN_FILE"),
    (TRAINER, "VLLM_API_KEY_FILE"),
)
LISTENERS = (
    (RUN_API, "RUN_API_HOST"),
    (SERVER, "GRPO_VLLM_HOST"),
    (TRAINER, "GRPO_METRICS_HOST"),
    (TRAINER, "GRPO_RUN_HOST"),
    (ENVIRONMENT, "--metrics-host"),
)
DIFFERENT: dict[tuple[str, str], str] = {
    **dict.fromkeys(LISTENERS, "a cluster may have IPv6 only, and Docker's host may have none"),
    (SERVER, "GRPO_VLLM_ALLOWED_HOSTS"): "other namespaces use the name SERVICE.NAMESPACE",
    (RUN_API, "RUN_API_ALLOWED_HOSTS"): "other namespaces use the name SERVICE.NAMESPACE",
    (TRAINER, "GRPO_VLLM_ALLOWED_HOSTS"): "single: the trainer's container runs the server",
    (RUN_API, "RUN_API_REDIS_DISK_BYTES"): "the chart knows the size of the volume",
    (RUN_API, "RUN_ID"): "releases of several namespaces may use one external Redis",
    (SERVER, "GRPO_VLLM_CONTROL_HOST"): "the kubelet reads the health port; in shared_vllm the "
    "trainer reaches the control port on the pod's loopback address",
    **dict.fromkeys(TOKEN_FILES, "a variable of a pod names a Secret, whose value is not shown"),
    (SERVER, "GRPO_VLLM_ADVERTISE_URL"): "a pod has a name below its Service; a container is found "
    "by its host name",
    (TRAINER, "MASTER_ADDR"): "the name of the trainer's Service",
    (TRAINER, "GRPO_WANDB_KEY_FILE"): "set only with a Secret",
    (TRAINER, "WANDB_DIR"): "data of W&B's offline mode outlive the pod",
    **{
        (TRAINER, f"GRPO_{name}_DEADLINE_S"): "a pod may need minutes to move to another node"
        for name in (
            *("SERVICE", "SERVER_RETURN", "ENVIRONMENT_RETURN"),
            *("BATCH", "RANK", "VLLM_REDIS"),
        )
    },
    (SERVER, "GRPO_VLLM_REDIS_DEADLINE_S"): "a pod may need minutes to move to another node",
    (ENVIRONMENT, "--ready-file"): "no service waits for the environment's pod",
    (ENVIRONMENT, "HF_HUB_OFFLINE"): "the same default, written in another way",
    (ENVIRONMENT, "--next-run-deadline-s"): "a Deployment keeps its pod; Compose lets it end",
}
"""Variable or option of a service: why it is different."""

HOSTS = {
    "//run-grpo-run-api:": "//run-api:",
    "//run-grpo-vllm-server:": "//vllm-server:",
    "//run-grpo-redis:": "//redis:",
}


def chart(mode: str, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Containers of the chart by component, with Compose's host names and run id."""
    layout = "gpu.sharing=singleContainer" if mode == "single" else "gpu.sharing=dra,device=gpu"
    settings = ["image.pullPolicy=Never", f"run.id={mode}"]
    if mode in {"single", "shared_vllm"}:
        settings += ["mode=shared_vllm", layout]
    else:
        settings += [f"mode={mode}", f"device={device}"]
    done = template("--set", ",".join(settings))
    assert done.returncode == 0, done.stderr
    text = done.stdout
    for ours, composes in HOSTS.items():
        text = text.replace(ours, composes)
    found: dict[str, dict[str, Any]] = {}
    for pod in pod_templates([o for o in yaml.safe_load_all(text) if o]):
        for container in containers(pod):
            if container["name"] not in {"await-model", "test"}:
                found.setdefault(container["name"], container)
    return found


def compose(mode: str, service: str) -> dict[str, Any]:
    device = "gpu" if mode == "shared_vllm" else "cpu"
    overrides = {"DTYPE": "bfloat16", "VLLM_FLAGS": "--gpu-memory-utilization 0.45"}
    found = services(mode, STACK_DEVICE=device, **(overrides if device == "gpu" else {}))
    suffix = mode.replace("shared_vllm", "shared").replace("_", "-")
    names = [service, f"{service}-{suffix}", suffix if service == TRAINER else ""]
    (each,) = [found[name] for name in names if name in found]
    return each


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


def shared(mode: str, values: dict[str, str]) -> dict[str, str]:
    """Addresses in the pod of the pair, as the names of Compose."""
    return {
        name: value.replace("//127.0.0.1:900", "//vllm-server:900")
        if mode == "shared_vllm"
        else value
        for name, value in values.items()
    }


def compared(service: str, ours: dict[str, str], theirs: dict[str, str]) -> None:
    left_out = {name for of, name in DIFFERENT if of == service}
    assert {n: v for n, v in ours.items() if n not in left_out} == {
        name: value for name, value in theirs.items() if name not in left_out
    }


def services_of(mode: str) -> tuple[str, ...]:
    return (RUN_API, TRAINER) if mode == "single" else (RUN_API, SERVER, TRAINER)


@pytest.mark.parametrize("mode", MODES)
def test_variables_are_the_same(mode: str) -> None:
    ours = chart(mode)
    for service in services_of(mode):
        theirs = {
            name: value or ""
            for name, value in compose(mode, service).get("environment", {}).items()
        }
        compared(service, shared(mode, variables(ours[service])), theirs)


def options(words: list[str]) -> dict[str, str]:
    """Positional words under their place, options under their name."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        else:
            found[name or str(len(found))] = word
            name = ""
    return found


@pytest.mark.parametrize("mode", MODES)
def test_commands_are_the_same(mode: str) -> None:
    ours = chart(mode)
    told = ours[TRAINER]["command"], compose(mode, TRAINER)
    expected = [*told[1]["entrypoint"], *([] if mode == "single" else told[1]["command"])]
    assert told[0] == expected
    for service in (ENVIRONMENT, REDIS, *services_of(mode)[1:]):
        if service == TRAINER and mode != "single":
            continue
        theirs = compose(mode, service)["command"]
        compared(service, split(ours[service].get("args", [])), split(theirs))


def split(words: list[str]) -> dict[str, str]:
    """Options; those in --server-flags on their own, because quotes and order do not matter."""
    found = options(words)
    flags = found.pop("--server-flags", "")
    return found | {f"server {name}": v for name, v in options(shlex.split(flags)).items()}
