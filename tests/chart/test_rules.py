"""Rules that hold in every shape: the restricted profile, connections, secrets, restarts."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml

from tests.chart.rendering import (
    CHART,
    NEWEST,
    ROOT,
    SHAPES,
    Object,
    component,
    containers,
    objects,
    pod_templates,
)

RESTRICTED_VOLUMES = {"emptyDir", "persistentVolumeClaim", "secret", "configMap", "projected"}
"""Kubernetes, "Pod Security Standards", restricted; without the kinds that the chart never uses."""
PORTS = {"redis": 6379, "run-api": 8000, "vllm-server": 9001}
CONTROL_PORT = 9002
TRAINER = "trainer"


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pod_is_hardened_to_the_restricted_profile_and_beyond(shape: str) -> None:
    for pod in pod_templates(objects(shape)):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec.get("volumes", []):
            assert set(volume) - {"name"} <= RESTRICTED_VOLUMES, volume
        for container in containers(pod):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "procMount", "runAsUser"} & set(security)
            assert all("hostPort" not in port for port in container.get("ports", []))


def test_only_the_environment_gets_the_profiles_that_its_sandbox_needs() -> None:
    chosen = [f"environment.{name}Profile.type=Unconfined" for name in ("seccomp", "appArmor")]
    profiles = {
        component(pod): {
            name: profile["type"]
            for name, profile in pod["spec"]["securityContext"].items()
            if name.endswith("Profile")
        }
        for pod in pod_templates(objects("minimal", NEWEST, "--set", ",".join(chosen)))
    }
    unconfined = {"seccompProfile": "Unconfined", "appArmorProfile": "Unconfined"}
    assert profiles.pop("environment") == unconfined
    assert [*profiles.values()] == [{"seccompProfile": "RuntimeDefault"}] * len(profiles)


@pytest.mark.parametrize("shape", SHAPES)
def test_whoever_is_told_an_address_may_connect_to_it_and_nobody_else(shape: str) -> None:
    policies = {component(o): o["spec"] for o in objects(shape) if o["kind"] == "NetworkPolicy"}
    serving = {"redis": "redis", "run-api": "run-api", "vllm-server": inference_of(shape)}
    told: dict[str, set[str]] = {name: set() for name in serving}
    for pod in pod_templates(objects(shape)):
        for service in serving:
            if f"//run-grpo-{service}:" in json.dumps(pod["spec"]):
                told[service].add(component(pod))
    for service, sources in told.items():
        if service in PORTS and serving[service] in policies:
            rule = policies[serving[service]]["ingress"][0]
            assert [port["port"] for port in rule["ports"]] == [PORTS[service]]
            allowed = {component_of(peer) for peer in rule["from"] if "podSelector" in peer}
            assert sources - {serving[service]} <= allowed, service
            # The server in the trainer's pod is not a pod of its own.
            assert allowed <= sources | {"vllm-server", "test"}, service
        for source in sources - {serving[service]}:
            reachable = [
                (component_of(peer), port["port"])
                for rule in policies[source]["egress"]
                for peer in rule.get("to", [])
                for port in rule.get("ports", [])
            ]
            if serving[service] in policies:
                assert (serving[service], PORTS[service]) in reachable, (source, service)


def component_of(peer: Object) -> str:
    name: str = peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
    return name


def inference_of(shape: str) -> str:
    """Component of the pods behind the inference server's Service."""
    pods = [p for p in pod_templates(objects(shape)) if "grpo/inference" in p["metadata"]["labels"]]
    (found,) = {component(pod) for pod in pods}
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_only_the_trainer_reaches_the_control_routes(shape: str) -> None:
    """The control port listens on the loopback address of the pod of both, or nowhere."""
    for pod in pod_templates(objects(shape)):
        for container in containers(pod):
            env = {e["name"]: e.get("value", "") for e in container.get("env", [])}
            if "GRPO_VLLM_CONTROL_PORT" in env:
                assert env["GRPO_VLLM_CONTROL_PORT"] == str(CONTROL_PORT)
                assert "GRPO_VLLM_CONTROL_HOST" not in env
                assert component(pod) == "trainer"
            assert CONTROL_PORT not in [p["containerPort"] for p in container.get("ports", [])]
    for each in objects(shape):
        if each["kind"] in {"Service", "NetworkPolicy"}:
            assert str(CONTROL_PORT) not in json.dumps(each["spec"])


@pytest.mark.parametrize("shape", SHAPES)
def test_every_port_is_open_in_clusters_of_either_address_family(shape: str) -> None:
    """The kubelet and other pods may have addresses of IPv4 alone, of IPv6 alone, or both."""
    hosts = {
        variable["value"]
        for pod in pod_templates(objects(shape))
        for container in containers(pod)
        for variable in container.get("env", [])
        if variable["name"].endswith("_HOST")
    }
    assert hosts == {"::"}
    assert "0.0.0.0" not in json.dumps(objects(shape))  # also in arguments


@pytest.mark.parametrize("shape", SHAPES)
def test_secrets_are_never_values(shape: str) -> None:
    """Only names of Secrets are values of the chart, so no object contains a secret."""
    for pod in pod_templates(objects(shape)):
        for container in containers(pod):
            for variable in container.get("env", []):
                if re.search("TOKEN$|API_KEY$", variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"]


def test_the_volumes_with_checkpoints_and_models_are_kept_on_uninstall() -> None:
    claims = [o for o in objects("minimal") if o["kind"] == "PersistentVolumeClaim"]
    assert {c["metadata"]["annotations"]["helm.sh/resource-policy"] for c in claims} == {"keep"}
    assert {component(c) for c in claims} == {"checkpoints", "models"}


def trainer_name(*settings: str) -> str:
    jobs = [o for o in objects("none-cpu", NEWEST, *settings) if o["kind"] == "Job"]
    (name,) = [j["metadata"]["name"] for j in jobs if component(j) == "trainer"]
    return str(name)


def test_an_upgrade_replaces_the_trainers_job_only_if_the_trainer_changes() -> None:
    name = trainer_name()
    assert trainer_name("--set", "runApi.replicas=3") == name
    assert trainer_name("--set", "run.steps=61") != name


@pytest.mark.parametrize("layout", ["shared-vllm-dra", "shared-vllm-gpu", "none-gpu"])
def test_one_gpu_is_requested_for_each_process_that_has_its_own(layout: str) -> None:
    found = {}
    for pod in pod_templates(objects(layout, NEWEST)):
        for container in containers(pod):
            resources = container.get("resources", {})
            gpus = resources.get("limits", {}).get("nvidia.com/gpu", 0)
            if gpus or resources.get("claims"):
                found[container["name"]] = gpus or resources["claims"][0]["name"]
    assert (
        found
        == {
            "shared-vllm-dra": {"trainer": "gpu", "vllm-server": "gpu"},
            "shared-vllm-gpu": {"trainer": 1},
            "none-gpu": {"trainer": 1, "vllm-server": 1},
        }[layout]
    )


def test_a_readwriteonce_volume_keeps_its_pods_on_one_node() -> None:
    for shape, affine in (("none-cpu", True), ("several-replicas", False)):
        for pod in pod_templates(objects(shape)):
            mounts = any("persistentVolumeClaim" in v for v in pod["spec"].get("volumes", []))
            assert ("affinity" in pod["spec"]) == (mounts and affine)
            assert not mounts or pod["metadata"]["labels"]["grpo/volumes"] == "true"


def test_the_chart_has_the_version_of_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = (ROOT / "shared/grpo_core/VERSION").read_text().strip()
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_several_servers_have_names_a_budget_and_nodes_of_their_own() -> None:
    settings = ("vllmServer.replicas=3", "vllmServer.podDisruptionBudget.enabled=true")
    found = objects("none-cpu", NEWEST, "--set", ",".join(settings))
    (servers,) = (o for o in found if o["kind"] == "StatefulSet" and component(o) == "vllm-server")
    assert servers["spec"]["replicas"] == 3
    (headless,) = (o for o in found if o["metadata"]["name"] == servers["spec"]["serviceName"])
    assert headless["spec"]["clusterIP"] == "None"
    pod = servers["spec"]["template"]
    assert headless["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    env = [(e["name"], e.get("value")) for e in pod["spec"]["containers"][0]["env"]]
    address = f"$(POD_NAME).{headless['metadata']['name']}"
    assert ("GRPO_VLLM_ADVERTISE_URL", f"http://{address}:9001") in env
    assert address in dict(env)["GRPO_VLLM_ALLOWED_HOSTS"].split(",")
    assert env[0][0] == "POD_NAME", "a variable is expanded after its definition only"
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    (budget,) = (o for o in found if o["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["selector"] == servers["spec"]["selector"]


def test_the_trainer_is_found_by_the_servers_and_stays_when_their_number_changes() -> None:
    found = objects("none-cpu")
    (trainer,) = (p for p in pod_templates(found) if component(p) == "trainer")
    env = {e["name"]: e.get("value") for e in trainer["spec"]["containers"][0]["env"]}
    services = {o["metadata"]["name"]: o for o in found if o["kind"] == "Service"}
    service = services[env["MASTER_ADDR"]]
    assert service["spec"]["selector"].items() <= trainer["metadata"]["labels"].items()
    assert [str(port["port"]) for port in service["spec"]["ports"]] == [env["MASTER_PORT"]]
    policies = {component(o): o["spec"] for o in found if o["kind"] == "NetworkPolicy"}
    peers = [
        (component_of(rule["to"][0]), rule["ports"][0]["port"])
        for rule in policies["vllm-server"]["egress"]
        if "to" in rule
    ]
    for target, port in (("trainer", int(env["MASTER_PORT"])), ("vllm-server", 10001)):
        assert (target, port) in peers
        rules = [r for r in policies[target]["ingress"] if r["ports"][0]["port"] == port]
        assert [component_of(peer) for r in rules for peer in r["from"]] == ["vllm-server"]
    assert trainer_name("--set", "vllmServer.replicas=3") == trainer_name()


def test_the_pods_of_several_nodes_meet_at_the_first_which_has_rank_0() -> None:
    found = objects("several-replicas")
    (job,) = (o["spec"] for o in found if o["kind"] == "Job" and component(o) == "trainer")
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    pod = job["template"]
    services = {o["metadata"]["name"]: o["spec"] for o in found if o["kind"] == "Service"}
    service = services[pod["spec"]["subdomain"]]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    (trainer,) = pod["spec"]["containers"]
    assert trainer["env"][0]["name"] == "JOB_NAME", "expanded after its definition only"
    env = {e["name"]: e.get("value") for e in trainer["env"]}
    first = f"$(JOB_NAME)-0.{pod['spec']['subdomain']}"
    assert (env["GRPO_RENDEZVOUS"], env["MASTER_ADDR"]) == (f"{first}:29400", first)
    assert (env["GRPO_RANKS"], env["GRPO_NODES"]) == ("4", "2")
    (policy,) = (
        o["spec"] for o in found if o["kind"] == "NetworkPolicy" and component(o) == TRAINER
    )
    for rules, side in ((policy["ingress"], "from"), (policy["egress"], "to")):
        every_port = [rule[side] for rule in rules if "ports" not in rule]
        assert [component_of(peer) for (peer,) in every_port] == [TRAINER]


def test_each_rank_gets_the_resources_of_one() -> None:
    one = {"requests": {"cpu": "500m", "memory": "2Gi"}, "limits": {"memory": 8_000_000_000}}
    setting = ("--set-json", f"trainer.resources={json.dumps(one)}", "--set", "trainer.ranks=3")
    pods = pod_templates(objects("none-gpu", NEWEST, *setting))
    (resources,) = (
        pod["spec"]["containers"][0]["resources"] for pod in pods if component(pod) == TRAINER
    )
    assert resources == {
        "requests": {"cpu": "1500m", "memory": "6Gi"},
        "limits": {"memory": "24000000000", "nvidia.com/gpu": 3},
    }


def documented(lines: list[str]) -> list[str]:
    """Lines of values.yaml with a value that no comment documents."""
    missing, above = [], ""
    for line in lines:
        stripped = line.strip()
        is_group = re.fullmatch(r"[\w]+:", stripped)
        if stripped and not stripped.startswith("#") and not is_group and not above.startswith("#"):
            missing.append(line)
        above = stripped
    return missing


def test_every_value_is_documented_and_known_to_the_schema() -> None:
    assert documented((CHART / "values.yaml").read_text().splitlines()) == []
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    require_same_keys(schema, values)


FREE = (
    *("resources", "nodeSelector", "tolerations", "labels", "metricLabels"),
    *("seccompProfile", "appArmorProfile"),
)


def require_same_keys(schema: Object, values: Object, path: str = "") -> None:
    assert schema["properties"].keys() == values.keys(), path
    for key, inner in schema["properties"].items():
        is_group = isinstance(values[key], dict) and key not in FREE
        assert bool(inner.get("properties")) == is_group, f"{path}{key}"
        if is_group:
            assert inner["additionalProperties"] is False, f"{path}{key}"
            require_same_keys(inner, values[key], f"{path}{key}.")


def test_arguments_with_quotes_survive_the_string_of_all_options() -> None:
    words = ["--hf-overrides", '{"rope": {"type": "linear"}}', "it's"]
    setting = ("--set-json", f"vllmServer.extraArgs={json.dumps(words)}")
    pods = pod_templates(objects("shared-vllm-cpu", NEWEST, *setting))
    (trainer,) = (pod for pod in pods if component(pod) == "trainer")
    (flags,) = trainer["spec"]["containers"][0]["args"]
    assert shlex.split(flags.removeprefix("--server-flags="))[-3:] == words


def test_arguments_may_be_numbers() -> None:
    """`--set trainer.extraArgs={--max-staleness,4}` passes a number."""
    for service in ("runApi", "vllmServer", "trainer", "environment"):
        setting = ("--set", f"{service}.extraArgs={{--option,1000000}}")
        pods = pod_templates(objects("none-cpu", NEWEST, *setting))
        words = [c.get("args", [])[-2:] for pod in pods for c in pod["spec"]["containers"]]
        assert ["--option", "1000000"] in words
