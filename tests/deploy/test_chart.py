"""The Helm chart: what Helm renders for many values is valid, and wrong values are refused by name."""

import hashlib
import importlib
import json
import re
import sys
import tarfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.helm import CHART, NAMESPACE, PACKAGES, RELEASE, Refused, needs_helm, render, select
from tests.deploy.kube_api import serve_kube_api

pytestmark = [needs_helm, pytest.mark.slow]

EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
VERSIONS = ("1.30", "1.33", "1.36")
CRDS = {"LeaderWorkerSet": "leaderworkersets", "ScaledObject": "scaledobjects"}
TRIED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "outside": {
        "nats": {"enabled": False},
        "externalNats": {"url": "tls://a.example:4222,tls://b.example:4222", "replicas": 3},
        "tls": {"enabled": True, "caSecret": "ca"},
    },
    "rotation": {"auth": {"rotation": 3, "keepFrom": 2}},
    "group scaled to zero": {
        "worker": {
            "model": "/m",
            "nodes": 2,
            "engineArgs": {"quote": 'a"b\n{{ x }}'},
            "autoscaling": {"enabled": True, "min": 0, "allowZero": True, "slots": 8},
        },
        "fleets": [{"name": "default", "workers": [{"name": "w"}]}],
    },
    "no users": {"auth": {"enabled": False}, "nats": {"enabled": False}, "externalNats": {"url": "nats://a:4222"}},
    "no policies": {"networkPolicy": {"enabled": False}, "auth": {"job": False}},
    "no volume claims": {
        "nats": {"config": {"cluster": {"enabled": False}, "jetstream": {"fileStore": {"pvc": {"enabled": False}}}}}
    },
    "prefill and decode on CPUs": {
        "worker": {"model": "/m", "kvTransferConfig": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "fleets": [{"name": "pd", "workers": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]}],
    },
    "two groups of four nodes": {
        "image": {"registry": "registry.example:5000/ml", "pullSecrets": ["registry"]},
        "auth": {"job": False},
        "tls": {"enabled": True, "caSecret": "own-ca"},
        "nats": {
            "global": {"image": {"pullSecretNames": ["registry"]}},
            "config": {"nats": {"tls": {"enabled": True, "secretName": "own-tls"}}},
        },
        "worker": {
            "model": "org/model",
            "nodes": 4,
            "gpus": 8,
            "replicas": 2,
            "engineArgs": {"tensor_parallel_size": 8, "pipeline_parallel_size": 4},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
        "fleets": [{"name": "big", "workers": [{"name": "w"}]}],
    },
}


def example(name: str) -> dict[str, Any]:
    """Return the values of one example."""
    found: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return found


def closed(schema: Any) -> Any:
    """Forbid unknown fields, which an API server would drop: a misspelled field is an error."""
    if isinstance(schema, dict):
        schema = {key: closed(value) for key, value in schema.items()}
        if schema.pop("x-kubernetes-int-or-string", False):
            schema = {"type": ["integer", "string"]}
        is_open = schema.pop("x-kubernetes-preserve-unknown-fields", False)
        if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema and not is_open:
            schema["additionalProperties"] = False
    return [closed(one) for one in schema] if isinstance(schema, list) else schema


def check(objects: list[dict[str, Any]]) -> None:
    """Validate all objects for each version of Kubernetes."""
    sys.path.append(str(PACKAGES))
    try:
        validate = importlib.import_module("kubernetes_validate").validate
    finally:
        sys.path.remove(str(PACKAGES))
    for one in objects:
        if one["kind"] in CRDS:
            crd = json.loads((Path(__file__).parent / "crds" / f"{CRDS[one['kind']]}.json").read_text())
            schema = closed(crd["versions"][one["apiVersion"].split("/")[1]])
            schema["properties"]["metadata"] = {"type": "object"}
            jsonschema.validate(one, schema)
            continue
        for version in VERSIONS:
            # It changes what it validates.
            validate(deepcopy(one), version, strict=True)
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)


@pytest.mark.parametrize("values", [*EXAMPLES, *TRIED], ids=lambda one: one if isinstance(one, str) else one.stem)
def test_objects_are_valid_and_locked_down(values: Path | str) -> None:
    """Each object is valid in three versions of Kubernetes; pods run without root, capabilities and a writable root."""
    objects = render(TRIED[values] if isinstance(values, str) else yaml.safe_load(values.read_text()))
    check(objects)
    pods = [found for one in objects for found in pod_specs(one)]
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert mounts.keys() <= volumes.keys() | claims(objects)
            assert container["name"] != "nats" or "/data" in [mount["mountPath"] for mount in mounts.values()]
    for name in {volume["secret"]["secretName"] for pod in pods for volume in pod["volumes"] if "secret" in volume}:
        outside = {"ca", "rollbus-ca", "nats-tls", "nats-route-tls"}
        job = [one for one in objects if one["kind"] == "Role"]
        assert not job or name in outside or name in job[0]["rules"][1]["resourceNames"], name


def test_a_registry_that_needs_a_login_is_used_by_all_pods() -> None:
    """Each pod has the pull secret, each node of a worker the tolerations, and an eviction leaves one group whole."""
    objects = render(TRIED["two groups of four nodes"])
    for pod in [found for one in objects for found in pod_specs(one)]:
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
    group = select(objects, "LeaderWorkerSet")["spec"]
    assert (group["replicas"], group["leaderWorkerTemplate"]["size"]) == (2, 4)
    assert all(pod["tolerations"] for pod in pod_specs(select(objects, "LeaderWorkerSet")))
    assert select(objects, "PodDisruptionBudget", "rl-big-w")["spec"]["minAvailable"] == 4


def claims(objects: list[dict[str, Any]]) -> set[str]:
    """Return the names of volumes that StatefulSets claim."""
    sets = [one for one in objects if one["kind"] == "StatefulSet"]
    return {claim["metadata"]["name"] for one in sets for claim in one["spec"].get("volumeClaimTemplates") or ()}


def pod_specs(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specifications of the pods of an object."""
    if one["kind"] == "LeaderWorkerSet":
        found = one["spec"]["leaderWorkerTemplate"]
        return [found[name]["spec"] for name in ("leaderTemplate", "workerTemplate")]
    return [one["spec"]["template"]["spec"]] if one["kind"] in {"StatefulSet", "Deployment", "Job"} else []


def test_nothing_rendered_is_secret_or_random() -> None:
    """Two renderings are equal and have no Secret: only the job makes keys."""
    first, second = render(), render()
    assert first == second
    assert "Secret" not in {one["kind"] for one in first}


def test_a_worker_has_time_to_drain_and_memory_for_shm() -> None:
    """Grace is drain, engine's stop and 15 s; the memory limit contains the shared memory; loading may take an hour."""
    pod = pod_specs(select(render(example("eight-gpus")), "StatefulSet", "rl-default-qwen"))[0]
    worker = pod["containers"][0]
    assert pod["terminationGracePeriodSeconds"] == 60 + 15 + 15
    assert worker["resources"]["limits"] == {"memory": f"{(160 + 16) * 1024 + 16}Mi", "nvidia.com/gpu": 2}
    start = worker["startupProbe"]
    assert start["httpGet"]["path"] == worker["livenessProbe"]["httpGet"]["path"] == "/health"
    assert start["periodSeconds"] * start["failureThreshold"] >= 3600
    assert worker["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_a_pod_sees_only_its_own_key_and_several_nodes_are_one_worker() -> None:
    """The key is mounted by the pod's name; only the leader of a group has one, asks for Ray and drains."""
    group = select(render(example("two-nodes")), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    leader, follower = (group[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    keys = [mount for mount in leader["volumeMounts"] if mount["name"] == "keys"]
    assert [mount["subPathExpr"] for mount in keys] == ["$(POD_NAME).creds"]
    assert not [mount for mount in follower["volumeMounts"] if mount["name"] == "keys"]
    engine = json.loads(leader["args"][leader["args"].index("--engine-args") + 1])
    assert engine == {"tensor_parallel_size": 16, "distributed_executor_backend": "ray"}
    assert "lifecycle" in leader
    assert "lifecycle" not in follower
    assert all(url.startswith("tls://rl-nats-") for url in leader["env"][1]["value"].split(","))


def test_a_paused_fleet_can_be_evicted_and_never_scales_to_zero_by_itself() -> None:
    """Unhealthy pods are evictable; the scaler has at least one worker and waits five minutes before it removes one."""
    objects = render(example("eight-gpus"))
    budget = select(objects, "PodDisruptionBudget", "rl-default-qwen")["spec"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert select(objects, "StatefulSet", "rl-default-qwen")["spec"]["podManagementPolicy"] == "Parallel"
    assert "replicas" not in select(objects, "StatefulSet", "rl-default-qwen")["spec"]
    scaler = select(objects, "ScaledObject")["spec"]
    assert (scaler["minReplicaCount"], scaler["maxReplicaCount"]) == (1, 4)
    down = scaler["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] == scaler["cooldownPeriod"] == 300


def one_worker(**settings: Any) -> dict[str, Any]:
    """Return values with one worker with these settings."""
    return {"fleets": [{"name": "default", "workers": [{"name": "w", "model": "/models/m"} | settings]}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "short grace": (one_worker(gracePeriodS=60), "gracePeriodS is 60; allowed: at least 90"),
    "typo": (one_worker(replica=2), "replica"),
    "text": (one_worker(replicas="two"), "replicas"),
    "negative": (one_worker(gpus=-1), "gpus"),
    "no workers": ({"fleets": [{"name": "default", "workers": []}]}, "workers"),
    "no fleets": ({"fleets": []}, "fleets"),
    "quantity": (one_worker(memory="lots"), "memory"),
    "fleet's name": ({"fleets": [{"name": "a.b", "workers": [{"name": "w", "model": "m"}]}]}, "name"),
    "command": (one_worker(name="$(id)"), "name"),
    "model": (one_worker(model=""), "model is empty"),
    "GPUs": (one_worker(gpus=2), "engineArgs use 1"),
    "role": (one_worker(role="prefill"), "needs kvTransferConfig"),
    "own option": (one_worker(extraArgs=["--probe=0.0.0.0:1"]), "extraArgs has --probe"),
    "zero": (one_worker(autoscaling={"enabled": True, "slots": 8, "min": 0}), "allowZero"),
    "zero by hpa": (
        one_worker(autoscaling={"enabled": True, "slots": 8, "min": 0, "allowZero": True, "kind": "hpa"}),
        "HorizontalPodAutoscaler",
    ),
    "slots": (one_worker(autoscaling={"enabled": True}), "slots is 0"),
    "max": (one_worker(autoscaling={"enabled": True, "slots": 8, "min": 9}), "below min"),
    "fast": (one_worker(autoscaling={"enabled": True, "slots": 8, "scaleDownAfterS": 5}), "scaleDownAfterS"),
    "long name": (one_worker(name="w" * 60), "name"),
    "no files": ({"nats": {"config": {"jetstream": {"fileStore": {"enabled": False}}}}}, "fileStore.enabled is false"),
    "one name twice": (
        {"fleets": [{"name": a, "workers": [{"name": b, "model": "m"}]} for a, b in (("x", "y-z"), ("x-y", "z"))]},
        "fleet x-y, workers z and fleet x, workers y-z would both have objects named rl-x-y-z",
    ),
    "the frontend's name": (one_worker(name="http"), "workers http and the frontend of fleet default"),
    "two servers": ({"nats": {"config": {"cluster": {"replicas": 2}}}}, "replicas is 2"),
    "no JetStream": ({"nats": {"config": {"jetstream": {"enabled": False}}}}, "jetstream.enabled"),
    "TLS by half": ({"tls": {"enabled": True}}, "nats.config.nats.tls.enabled"),
    "no users": ({"auth": {"enabled": False}}, "auth.enabled is false"),
    "no NATS": ({"nats": {"enabled": False}}, "externalNats.url is empty"),
    "two NATS": ({"externalNats": {"url": "nats://a:4222"}}, "one of them"),
    "url": ({"nats": {"enabled": False}, "externalNats": {"url": "http://a"}}, "url"),
    "rotation": ({"auth": {"keepFrom": 2}}, "keepFrom is 2, above"),
    "user": (
        {"fleets": [{"name": "f", "trainers": ["frontend"], "workers": [{"name": "w", "model": "m"}]}]},
        "two users",
    ),
    "user of a rotation": (
        {"fleets": [{"name": "f", "trainers": ["a-k2"], "workers": [{"name": "w", "model": "m"}]}]},
        "ends like a rotation",
    ),
    "two volumes": (one_worker(models={"hostPath": {"path": "/a"}, "emptyDir": {}}), "models"),
    "twice": ({"fleets": [{"name": "f", "workers": [{"name": "w", "model": "m"}] * 2}]}, "workers w twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_values_are_refused_by_name(case: str) -> None:
    """Helm renders nothing and names the value."""
    values, problem = REFUSED[case]
    with pytest.raises(Refused) as refused:
        render(values)
    assert problem in str(refused.value)


def test_another_size_of_the_volumes_is_refused() -> None:
    """The claims of a running StatefulSet cannot change, so an upgrade with another size names the page to read."""
    with serve_kube_api() as api:
        servers = select(render(api=api), "StatefulSet", "rl-nats")
        owner = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
        servers["metadata"]["annotations"] = owner
        api.objects[f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets/{RELEASE}-nats"] = servers
        select(render(api=api), "StatefulSet", "rl-nats")
        larger = {"nats": {"config": {"jetstream": {"fileStore": {"pvc": {"size": "99Gi"}}}}}}
        with pytest.raises(Refused, match=re.escape("99Gi, but the volumes of rl-nats have 50Gi")):
            render(larger, api=api)


def test_the_images_are_those_of_the_dockerfile() -> None:
    """Each image of the values is a target of the Dockerfile, and its user is the user of the pods."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())["image"]
    dockerfile = (CHART.parents[1] / "docker/Dockerfile").read_text()
    targets = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.M)
    assert {values[name].removeprefix("rollbus/") for name in ("client", "frontend", "worker")} <= set(targets)
    assert set(re.findall(r"useradd --uid (\d+)", dockerfile)) == {"10001"}
    users = {pod["securityContext"]["runAsUser"] for one in render() for pod in pod_specs(one)}
    assert users == {10001}


def test_the_archive_is_the_locked_one() -> None:
    """Chart.lock has the digest that Helm computes from Chart.yaml, and the archive has the recorded sum."""
    wanted = yaml.safe_load((CHART / "Chart.yaml").read_text())["dependencies"]
    lock = yaml.safe_load((CHART / "Chart.lock").read_text())
    fields = ("name", "version", "repository", "condition")
    both = [
        [{name: one[name] for name in fields if name in one} for one in each] for each in (wanted, lock["dependencies"])
    ]
    digest = hashlib.sha256(json.dumps(both, separators=(",", ":")).encode()).hexdigest()
    assert lock["digest"] == f"sha256:{digest}"
    digest, name = (CHART / "charts/SHA256SUMS").read_text().split()
    assert hashlib.sha256((CHART / "charts" / name).read_bytes()).hexdigest() == digest
    with tarfile.open(CHART / "charts" / name) as archive:
        assert b"Apache License" in archive.extractfile("nats/LICENSE").read()
