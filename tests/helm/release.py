"""A release of the chart on the cluster of with_cluster.sh."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.chart.rendering import HELM, ROOT
from tests.support.wait import wait_for

RUN_WITHIN_S = 3600.0
NAME = "run"
INDEXED_JOBS = Path(__file__).parent / "indexed_jobs.py"


def relaxed_chart(directory: Path) -> Path:
    """A copy that accepts Kubernetes 1.20, which has the API of every object that the tests use."""
    chart = directory / "grpo"
    shutil.copytree(ROOT / "helm" / "grpo", chart)
    file = chart / "Chart.yaml"
    file.write_text(re.sub('kubeVersion: ".*"', 'kubeVersion: ">=1.20.0-0"', file.read_text()))
    return chart


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=RUN_WITHIN_S)


def kubectl(*words: str) -> str:
    done = command("kubectl", *words)
    assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
    return done.stdout


@dataclass
class Release:
    mode: str
    namespace: str
    chart: Path
    tag: str

    def install(self, *settings: str) -> str:
        """Install or upgrade, and wait until the services are ready."""
        values = [f"mode={self.mode}", f"image.tag={self.tag}", "image.pullPolicy=Never", *settings]
        return self.helm(
            *("upgrade", "--install", NAME, str(self.chart), "--wait", "--timeout", "20m"),
            # The tests' Kubernetes is older than podFailurePolicy, and ignores it.
            *("--disable-openapi-validation", "--set", ",".join(values)),
            *("--post-renderer", sys.executable, "--post-renderer-args", str(INDEXED_JOBS)),
        )

    def helm(self, *words: str) -> str:
        done = command(str(HELM), "--namespace", self.namespace, *words)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def kubectl(self, *words: str) -> str:
        return kubectl("--namespace", self.namespace, *words)

    def items(self, kind: str, component: str) -> list[dict[str, Any]]:
        """Objects of a component, the oldest first."""
        label = f"app.kubernetes.io/component={component}"
        oldest_first = ("--sort-by", ".metadata.creationTimestamp")
        found = self.kubectl("get", kind, "-l", label, *oldest_first, "-o", "json")
        items: list[dict[str, Any]] = json.loads(found)["items"]
        return items

    def hit(self, component: str, pod: str = "") -> None:
        """Send SIGKILL to a component's container, and wait for the next step."""
        labels = {"pod.namespace": self.namespace, "container.name": component}
        labels |= {"pod.name": pod} if pod else {}
        filters = [f"label=io.kubernetes.{name}={value}" for name, value in labels.items()]
        found = command("docker", "ps", "--quiet", *(f"--filter={each}" for each in filters))
        assert found.stdout, f"no container {component} runs: {found.stderr}"
        done = command("docker", "kill", found.stdout.split()[0])
        assert done.returncode == 0, done.stderr
        seen = len(self.records())
        self.wait_until(lambda: len(self.records()) > seen)

    def trainer_pod(self) -> str:
        """Name of the newest one."""
        name: str = self.items("pods", "trainer")[-1]["metadata"]["name"]
        return name

    def trainer_has_ended(self) -> bool:
        """Raises an error if a Job of the trainer has failed."""
        ended = [
            {c["type"] for c in job["status"].get("conditions", []) if c["status"] == "True"}
            for job in self.items("jobs", "trainer")
        ]
        assert not any("Failed" in types for types in ended), self.logs()
        return all("Complete" in types for types in ended)

    def wait_until(self, holds: Callable[[], object]) -> None:
        try:
            wait_for(holds, deadline_s=RUN_WITHIN_S)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.logs()}") from None

    def files(self) -> Path:
        """The run's directory in the volume for checkpoints, which is a directory of this host."""
        claim = json.loads(self.kubectl("get", "pvc", f"{NAME}-grpo-checkpoints", "-o", "json"))
        volume = json.loads(kubectl("get", "pv", claim["spec"]["volumeName"], "-o", "json"))
        return Path(volume["spec"]["hostPath"]["path"]) / f"{self.namespace}-{NAME}"

    def records(self) -> list[dict[str, Any]]:
        """Metrics of each step."""
        file = self.files() / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def run_api(self, path: str) -> httpx.Response:
        service = json.loads(self.kubectl("get", "service", f"{NAME}-grpo-run-api", "-o", "json"))
        return httpx.get(f"http://{service['spec']['clusterIP']}:8000{path}").raise_for_status()

    def run_api_metric(self, name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", self.run_api("/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def groups_sent(self) -> int:
        """Number of groups that run-api confirmed to the environment since it was hit. It ends with
        the run, and its pod then waits in a new container for the next run."""

        def sent() -> str:
            previous = ("logs", f"deployment/{NAME}-grpo-environment", "--previous")
            log = command("kubectl", "--namespace", self.namespace, *previous).stdout
            found = re.search(r"run.completed .*groups_sent=(\d+)", log)
            return found[1] if found else ""

        self.wait_until(sent)
        return int(sent())

    def logs(self) -> str:
        """Pods, events, and the last lines of every container."""
        parts = [self.kubectl("get", "pods", "--output", "wide")]
        parts.append(self.kubectl("get", "events", "--sort-by", ".lastTimestamp")[-4000:])
        for pod in parts[0].splitlines()[1:]:
            tail = ("--all-containers", "--tail", "15", "--prefix")
            done = command("kubectl", "-n", self.namespace, "logs", pod.split()[0], *tail)
            parts.append(done.stdout + done.stderr)
        return "\n".join(parts)
