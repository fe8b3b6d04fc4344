"""A trainer of two pods, each of which is killed and one deleted. This Kubernetes has no Indexed
Jobs: see indexed_jobs.py."""

from __future__ import annotations

import json

import pytest

from tests.containers.stack import TEST_WITHIN_S
from tests.helm.indexed_jobs import INDEX
from tests.helm.release import Release

STEPS = 60

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


def pod_of(release: Release, index: int) -> str:
    """Name of the newest one."""
    pods = release.items("pods", "trainer")
    own = [pod["metadata"] for pod in pods if pod["metadata"]["labels"][INDEX] == str(index)]
    name: str = own[-1]["name"]
    return name


def test_ranks_of_two_pods_train_one_model_and_lost_pods_come_back(two_nodes: Release) -> None:
    release = two_nodes
    release.install(
        *(f"run.steps={STEPS}", "trainer.extraArgs={--fsdp,--state-interval,2}"),
        *("trainer.nodes=2", "persistence.accessMode=ReadWriteMany"),
    )
    release.wait_until(lambda: len(release.records()) >= 5)
    first = [pod_of(release, index) for index in range(2)]
    for index in (1, 0):
        release.hit("trainer", pod_of(release, index))
    seen = len(release.records())
    release.kubectl("delete", "pod", pod_of(release, 1), "--wait=false")
    release.wait_until(release.trainer_has_ended)
    assert seen < STEPS  # else nothing went on
    assert not {*first} & {pod_of(release, index) for index in range(2)}

    records = release.records()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert sum(record["data/repeated_groups"] for record in records) == 0
    for name in ("delivered", "acknowledged"):
        assert release.run_api_metric(f"run_api_batches_{name}_total") == STEPS
    started = [
        json.loads(line) for line in (release.files() / "provenance.jsonl").read_text().splitlines()
    ]
    assert {one["machine"]["ranks"] for one in started if "machine" in one} == {2}
