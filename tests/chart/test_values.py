"""Values that the page of the chart shows are accepted. A wrong value ends `helm install` before it
creates anything, with a message that names value and fix.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chart.rendering import ROOT, template

GOOD = ("image.registry=r",)
BAD = {
    "unknown key": (["modee=none"], ["modee", "not allowed"]),
    "wrong mode": (["mode=shared"], ["mode", '"shared_vllm", "lora_only"']),
    "missing image": (["image.registry="], ["image.registry", "make images REGISTRY="]),
    "negative replicas": (
        ["runApi.replicas=-1"],
        ["runApi.replicas", "greater than or equal to 1"],
    ),
    "a number as text": (["run.steps=many"], ["run.steps", "Expected: integer"]),
    "size without a unit": (["persistence.models.size=big"], ["persistence.models.size"]),
    "both Redis": (
        ["redis.external.existingSecret=mine"],
        ["redis.enabled is true", "redis.external.existingSecret is mine", "redis.enabled=false"],
    ),
    "no Redis": (["redis.enabled=false"], ["redis.external.existingSecret", "redis.enabled=true"]),
    "a reward without prompts": (
        ["environment.task=my.py:reward", "environment.tasksConfigMap=mine"],
        ["environment.task is my.py:reward", "environment.data"],
    ),
    "two data sets": (
        ["environment.data=org/rows", "environment.dataClaim=rows"],
        ["environment.data is org/rows", "environment.dataClaim is rows"],
    ),
    "dra on a CPU": (["gpu.sharing=dra"], ["gpu.sharing is dra", "device=gpu"]),
    "RWO on two nodes": (
        ["mode=none", "trainer.nodeSelector.pool=a"],
        ["ReadWriteOnce", "trainer.nodeSelector", "persistence.accessMode=ReadWriteMany"],
    ),
    "metrics that nobody can read": (
        ["metrics.serviceMonitor.enabled=true", "environment.keda.enabled=true"],
        ["metrics.serviceMonitor.enabled is true", "environment.keda.enabled is true", "allowFrom"],
    ),
    "model without a learning rate": (["model.name=a/b"], ["model.name is a/b", "run.lr=1e-5"]),
    "model outside the volume": (
        ["model.name=/data/model", "run.lr=0.1"],
        ["model.name is /data/model", "below /models"],
    ),
    "group size": (["environment.groupSize=7"], ["environment.groupSize 7", "128 sequences"]),
    "sequence too long": (["run.seqLen=4096"], ["run.seqLen 4096", "vllmServer.maxModelLen 1536"]),
    "W&B without a key": (["wandb.enabled=true"], ["wandb.existingSecret", "wandb.mode=offline"]),
    "servers that share one memory": (
        ["vllmServer.replicas=3"],
        ["vllmServer.replicas is 3", "mode shared_vllm", "mode=none"],
    ),
    "workers that share one memory": (
        ["vllmServer.gpus=2"],
        ["vllmServer.gpus is 2", "mode shared_vllm", "mode=none"],
    ),
    "ranks that share one memory": (
        ["trainer.ranks=2"],
        ["trainer.ranks is 2", "mode shared_vllm needs one trainer process", "mode=none"],
    ),
    "nodes without a volume for all": (
        ["mode=none", "trainer.nodes=2"],
        ["trainer.nodes is 2", "persistence.accessMode=ReadWriteMany", "a larger trainer.ranks"],
    ),
    "a budget of one server": (
        ["mode=none", "vllmServer.podDisruptionBudget.enabled=true"],
        ["vllmServer.replicas is 1", "vllmServer.replicas=2"],
    ),
    "more pods at least than at most": (
        ["runApi.autoscaling.minReplicas=9"],
        ["runApi.autoscaling.minReplicas 9", "raise maxReplicas"],
    ),
    "annotations without the token": (
        ["metrics.podAnnotations=true", "accessToken.existingSecret=a"],
        ["metrics.podAnnotations is true", "metrics.serviceMonitor.enabled=true"],
    ),
    "no image of the model's Job": (
        [
            "image.registry=",
            *(f"{name}.image=x" for name in ("runApi", "vllmServer", "trainer", "environment")),
            "redis.image=x",
        ],
        ["image.registry is empty"],
    ),
    "a run above the volume": (["run.id=.."], ["run.id", "pattern"]),
    "budget of one pod": (
        ["runApi.podDisruptionBudget.enabled=true"],
        ["runApi.replicas is 1", "runApi.replicas=2"],
    ),
    "rank too large": (["mode=lora_only", "run.lora.r=1024"], ["run.lora.r is 1024", "512"]),
}


@pytest.mark.parametrize("mistake", BAD)
def test_the_message_names_the_value_and_the_fix(mistake: str) -> None:
    settings, words = BAD[mistake]
    done = template("--set", ",".join([*GOOD, *settings]))
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr


def test_a_cluster_too_old_for_dra_is_refused() -> None:
    dra = ("--set", "image.registry=r,device=gpu,gpu.sharing=dra")
    refused = template(*dra, version="1.33")
    assert refused.returncode == 1
    assert "needs Kubernetes 1.34, but the cluster has v1.33" in refused.stderr
    assert template(*dra, version="1.34").returncode == 0
    assert template("--set", "image.registry=r", version="1.29").returncode == 1


def test_all_mistakes_are_printed_at_once() -> None:
    done = template("--set", "image.registry=r,redis.enabled=false,environment.groupSize=7")
    assert "redis.enabled" in done.stderr
    assert "environment.groupSize" in done.stderr


PAGE = (ROOT / "docs/how-to/kubernetes.md").read_text()
ON_EVERY_NODE = ("--set", "image.pullPolicy=Never")
PLACEHOLDER = re.compile(r"<[^>\n]*>")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def values_files() -> list[str]:
    return [block for block in blocks("yaml") if not block.startswith("apiVersion:")]


def settings() -> set[str]:
    """Values of commands, and values with an equals sign in the text."""
    commands = re.findall(r"--set (\S+=\S+)", PLACEHOLDER.sub("x", "\n".join(blocks("bash"))))
    text = re.findall(r"`([a-z]\w*(?:\.\w+)*=[^`\n]*)`", PLACEHOLDER.sub("x", PAGE))
    return {*commands, *text}


@pytest.mark.parametrize("number", range(len(values_files())))
def test_a_values_file_is_accepted(number: int, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(values_files()[number])
    done = template("--values", str(file), *ON_EVERY_NODE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("setting", sorted(settings()))
def test_the_schema_accepts_a_setting(setting: str) -> None:
    """Alone it may be refused by the rules, which name values that it needs beside it."""
    stderr = template("--set", setting, *ON_EVERY_NODE).stderr
    assert "schema" not in stderr, stderr
