"""Schemas of the custom resources that the chart may create. Unknown keys are errors.

They have the fields that the chart uses, as the CustomResourceDefinitions of JobSet,
LeaderWorkerSet, KEDA and the Prometheus operator define them. Templates of jobs and pods are
checked as objects of Kubernetes.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
TEMPLATE: Schema = {"type": "object"}


def fields(required: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def many(item: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": item}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}

SPECS: dict[tuple[str, str], Schema] = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): fields(
        "replicatedJobs",
        replicatedJobs=many(
            fields(
                "name template",
                name=TEXT,
                replicas=COUNT,
                template=fields("spec", metadata=fields("", labels=LABELS), spec=TEMPLATE),
            )
        ),
        successPolicy=fields(
            "operator", operator=one_of("All", "Any"), targetReplicatedJobs=many(TEXT)
        ),
        failurePolicy=fields(
            "",
            maxRestarts=COUNT,
            rules=many(
                fields(
                    "action",
                    action=one_of(
                        "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"
                    ),
                    onJobFailureReasons=many(
                        one_of("BackoffLimitExceeded", "PodFailurePolicy", "DeadlineExceeded")
                    ),
                    targetReplicatedJobs=many(TEXT),
                )
            ),
        ),
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): fields(
        "leaderWorkerTemplate",
        replicas=COUNT,
        startupPolicy=one_of("LeaderCreated", "LeaderReady"),
        leaderWorkerTemplate=fields(
            "workerTemplate",
            size={"type": "integer", "minimum": 1},
            restartPolicy=one_of("RecreateGroupOnPodRestart", "None"),
            leaderTemplate=fields("spec", metadata=fields("", labels=LABELS), spec=TEMPLATE),
            workerTemplate=fields("spec", metadata=fields("", labels=LABELS), spec=TEMPLATE),
        ),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): fields(
        "scaleTargetRef triggers",
        scaleTargetRef=fields("name", name=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        advanced=fields(
            "",
            scalingModifiers=fields(
                "",
                formula=TEXT,
                target=TEXT,
                metricType=one_of("AverageValue", "Value"),
            ),
        ),
        triggers=many(
            fields(
                "type metadata",
                type=TEXT,
                name=TEXT,
                metadata=LABELS,
                authenticationRef=fields("name", name=TEXT),
            )
        ),
    ),
    ("keda.sh/v1alpha1", "TriggerAuthentication"): fields(
        "",
        secretTargetRef=many(fields("parameter name key", parameter=TEXT, name=TEXT, key=TEXT)),
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): fields(
        "endpoints selector",
        selector=fields("", matchLabels=LABELS),
        endpoints=many(
            fields(
                "",
                port=TEXT,
                path=TEXT,
                interval=TEXT,
                authorization=fields("", credentials=fields("key", name=TEXT, key=TEXT)),
            )
        ),
    ),
}
