"""A post-renderer of Helm for Kubernetes 1.20, which has no Indexed Jobs: each becomes one Job per
index. Its pods have the host name and the labels that the controller of a newer Kubernetes gives
them. Other objects stay as they are."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from typing import Any

import yaml

INDEX = "batch.kubernetes.io/job-completion-index"


def parts(each: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if each["spec"].pop("completionMode", "") != "Indexed":
        yield each
        return
    job = each["metadata"]["name"]
    for index in range(each["spec"]["completions"]):
        part = copy.deepcopy(each)
        part["metadata"]["name"] = f"{job}-{index}"
        labels = {"job-name": job, INDEX: str(index)}
        part["spec"] |= {"completions": 1, "parallelism": 1}
        part["spec"] |= {"manualSelector": True, "selector": {"matchLabels": labels}}
        pod = part["spec"]["template"]
        pod["metadata"]["labels"] |= labels
        pod["spec"]["hostname"] = f"{job}-{index}"
        yield part


def main() -> None:
    found = [each for each in yaml.safe_load_all(sys.stdin) if each]
    changed = [part for each in found for part in (parts(each) if "spec" in each else [each])]
    # As JSON, which quotes every text: PyYAML does not quote 3e-4, which Helm reads as a number.
    sys.stdout.writelines(f"---\n{json.dumps(each)}\n" for each in changed)


if __name__ == "__main__":
    main()
