"""The chart on a real Kubernetes, in every mode, with the images for CPUs."""

from __future__ import annotations

import pytest

from tests.chart.rendering import HELM, ROOT
from tests.containers.stack import NOISE, TEST_WITHIN_S
from tests.helm.release import Release, command

STEPS = 120
HIT = ("environment", "redis", "run-api", "vllm-server", "trainer")
GROUPS_PER_STEP = 128 // 8
SAVED = {"lora_only": "final_adapter", "lora_restart": "final_adapter"}

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


def test_a_run_survives_kills_a_deleted_pod_and_an_upgrade(release: Release) -> None:
    servers = 1 if release.mode == "shared_vllm" else 2
    settings = (
        *(f"run.steps={STEPS}", "trainer.extraArgs={--state-interval,2}"),
        f"vllmServer.replicas={servers}",
    )
    notes = release.install(*settings)
    assert "logs --follow" in notes
    assert "Succeeded" in release.helm("test", "run", "--timeout", "5m")
    release.wait_until(lambda: len(release.records()) >= 5)

    before = groups_received(release)
    for component in HIT:
        if component != "vllm-server" or servers > 1:  # else it is in the trainer's container
            release.hit(component)

    first = release.trainer_pod()
    if servers > 1:  # its successor joins at the newest weights
        assert len(release.items("pods", "vllm-server")) == servers
        release.kubectl("delete", "pod", "run-grpo-vllm-server-1", "--wait=false")
    release.kubectl("delete", "pod", first, "--wait=true")
    seen = len(release.records())
    release.install(*settings, "runApi.replicas=2")
    assert len(release.items("pods", "run-api")) == 2
    release.wait_until(release.trainer_has_ended)
    assert release.trainer_pod() != first
    assert seen < STEPS  # else nothing went on

    waited = command("bash", str(ROOT / "helm/wait.sh"), "run", "kubectl", "-n", release.namespace)
    assert waited.returncode == 0
    assert f"step {STEPS}/{STEPS}  reward 0." in waited.stdout
    assert "the trainer has finished" in waited.stdout

    every_group_is_trained_once(release, before)
    summary = release.files() / SAVED.get(release.mode, "final_model")
    release.helm("uninstall", "run", "--wait")
    assert [file.suffix for file in summary.iterdir() if file.suffix == ".safetensors"]
    assert "run-grpo-checkpoints" in release.kubectl("get", "pvc")


def groups_received(release: Release) -> float:
    """By run-api: those in batches, and those in the queue."""
    batches = release.run_api_metric("run_api_batches_delivered_total")
    return batches * GROUPS_PER_STEP + release.run_api_metric("run_api_queued_groups")


def every_group_is_trained_once(release: Release, before: float) -> None:
    """Args: before: groups that run-api had received when the environment was hit"""
    records = release.records()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert sum(record["data/repeated_groups"] for record in records) == 0
    assert max(record.get("alignment/probe_max", 0.0) for record in records) < NOISE
    delivered = release.run_api_metric("run_api_batches_delivered_total")
    assert delivered == release.run_api_metric("run_api_batches_acknowledged_total") == STEPS
    # No submission was lost: each is in a batch or in the queue.
    assert before + release.groups_sent() <= groups_received(release)


def test_a_secret_that_does_not_exist_is_refused(chart: object) -> None:
    settings = "image.pullPolicy=Never,accessToken.existingSecret=missing"
    done = command(str(HELM), "install", "refused", str(chart), "--set", settings)
    assert done.returncode == 1
    assert "accessToken.existingSecret is missing" in done.stderr
    assert "kubectl create secret generic missing" in done.stderr
