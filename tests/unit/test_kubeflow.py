"""The manifests for Kubeflow have the fields that its operators read, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdkit.errors import NonFiniteError
from hvdkit.watchdog.verdict import PREEMPTED

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
# The fields of these resources that the manifests may use, from the schemas of kubeflow/trainer 8c0f505 (v1alpha1) and
# kubeflow/mpi-operator caa3c47 (v2beta1): a dict has fields by name, a list its elements, a tuple the values allowed.
METADATA = {"name": str, "labels": dict}
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "readinessProbe": {"tcpSocket": {"port": int}},
    "resources": {"limits": dict},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {
    "restartPolicy": ("Never", "OnFailure", "Always"),
    "terminationGracePeriodSeconds": int,
    "containers": [CONTAINER],
    "volumes": [{"name": str, "emptyDir": {"medium": ("Memory", "")}}],
}
RULE = {
    "action": ("Ignore", "FailJob", "FailIndex", "Count"),
    "onPodConditions": [{"type": str, "status": ("True", "False", "Unknown")}],
    "onExitCodes": {"containerName": str, "operator": ("In", "NotIn"), "values": [int]},
}
JOB = {"backoffLimit": int, "podFailurePolicy": {"rules": [RULE]}, "template": {"spec": POD}}
REPLICATED_JOB = {
    "name": str,
    "dependsOn": [{"name": str, "status": ("Ready", "Complete")}],
    "template": {"metadata": METADATA, "spec": JOB},
}
RUNTIME = {
    "mlPolicy": {
        "numNodes": int,
        "mpi": {
            "numProcPerNode": int,
            "mpiImplementation": ("OpenMPI",),
            "sshAuthMountPath": str,
            "runLauncherAsNode": bool,
        },
    },
    "template": {
        "spec": {
            "network": {"publishNotReadyAddresses": bool},
            "successPolicy": {"operator": ("All", "Any"), "targetReplicatedJobs": [str]},
            "failurePolicy": {"maxRestarts": int},
            "replicatedJobs": [REPLICATED_JOB],
        }
    },
}
TRAIN_JOB = {
    "runtimeRef": {"name": str},
    "trainer": {"numNodes": int, "numProcPerNode": int, "command": [str]},
}
REPLICAS = {"replicas": int, "restartPolicy": ("Never", "OnFailure"), "template": {"spec": POD}}
MPI_JOB = {
    "slotsPerWorker": int,
    "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
    "runPolicy": {"cleanPodPolicy": ("None", "Running", "All"), "backoffLimit": int},
    "mpiReplicaSpecs": {"Launcher": REPLICAS, "Worker": REPLICAS},
}
SPECS = {
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): RUNTIME,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TRAIN_JOB,
    ("kubeflow.org/v2beta1", "MPIJob"): MPI_JOB,
}


def problems(value: Any, schema: Any, path: str = "") -> Iterator[str]:
    """Yield where a value does not match a schema."""
    if isinstance(schema, dict) and isinstance(value, dict):
        for name, part in value.items():
            if name in schema:
                yield from problems(part, schema[name], f"{path}.{name}")
            else:
                yield f"{path}.{name} does not exist"
    elif isinstance(schema, list) and isinstance(value, list):
        for index, part in enumerate(value):
            yield from problems(part, schema[0], f"{path}[{index}]")
    elif isinstance(schema, tuple):
        if value not in schema:
            yield f"{path} is {value}"
    elif not isinstance(schema, type) or type(value) is not schema:
        yield f"{path} is {value!r}"


def documents(name: str) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((LAUNCH / name).read_text())}


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubeflow-trainjob.yaml"])
def test_a_manifest_has_only_fields_of_its_schema(name):
    for kind, document in documents(name).items():
        schema = {"apiVersion": str, "kind": str, "metadata": METADATA, "spec": SPECS[document["apiVersion"], kind]}
        assert not list(problems(document, schema))


def test_the_check_finds_what_is_wrong():
    assert list(problems({"a": 1, "b": [2]}, {"a": str, "b": [("x",)]})) == [".a is 1", ".b[0] is 2"]
    assert list(problems({"c": True, "d": 1}, {"c": int})) == [".c is True", ".d does not exist"]


def test_the_parts_of_a_train_job_fit_together():
    runtime, job = documents("kubeflow-trainjob.yaml").values()
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert runtime["spec"]["mlPolicy"]["numNodes"] == 1  # of pods of the replicated job with the label below
    jobs = {one["name"]: one["template"] for one in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    assert {*jobs} == {"node", "launcher"}
    assert jobs["launcher"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    for template in jobs.values():  # the operator mounts keys and the hostfile into containers of this name
        assert [one["name"] for one in template["spec"]["template"]["spec"]["containers"]] == ["node"]


def test_a_preempted_launcher_is_started_again_and_wrong_usage_is_not():
    runtime = documents("kubeflow-trainjob.yaml")["ClusterTrainingRuntime"]
    launcher = runtime["spec"]["template"]["spec"]["replicatedJobs"][1]["template"]["spec"]
    actions = {
        code: rule["action"]
        for rule in launcher["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", ["disrupted"])
    }
    assert actions == {"disrupted": "Ignore", PREEMPTED: "Ignore", 2: "FailJob", NonFiniteError.exit_code: "FailJob"}
    pods = [launcher["template"]["spec"]]
    assert pods[0]["restartPolicy"] == "Never"  # Kubernetes accepts a podFailurePolicy with it only
    pods.append(documents("kubernetes.yaml")["MPIJob"]["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"])
    assert {pod["terminationGracePeriodSeconds"] for pod in pods} == {60}
