"""A job for Kubernetes: an MPIJob of the MPI operator (kubeflow.org/v2beta1). Pure, except for ``kubectl`` at the end.

The launcher's pod runs ``hvdkit run``, which uses ssh to the workers that the operator lists in a hostfile. So logs,
exit codes, restarts and the check of all hosts work as on other clusters.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence

from hvdkit.commands.run.config import RunConfig
from hvdkit.errors import ClusterError, describe

HOSTFILE = "/etc/mpi/hostfile"
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")
_TEMPLATE = """\
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata:
  name: {name}
spec:
  slotsPerWorker: {slots}
  mpiImplementation: OpenMPI
  runPolicy:
    cleanPodPolicy: Running
    backoffLimit: 3  # restarts of the launcher's pod; training continues from its newest checkpoint
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          terminationGracePeriodSeconds: 60  # more than the 30 s that hvdkit run gives ranks to save
          containers:
            - name: launcher
              image: {image}
              command: {command}
    Worker:
      replicas: {workers}
      template:
        spec:
          containers:
            - name: worker
              image: {image}
              resources:
                limits: {limits}
              volumeMounts:
                - name: shared-memory
                  mountPath: /dev/shm
          volumes:
            - name: shared-memory  # ranks of a pod exchange data here; a container has 64 MiB by default
              emptyDir:
                medium: Memory
"""


def manifest(config: RunConfig, program: Sequence[str]) -> str:
    """Return the MPIJob as YAML. Values are written as JSON, so that they cannot break its syntax.

    Raises:
        ValueError: -np is missing or not a multiple of --slots-per-worker, the name is invalid, or --env was passed.
    """
    if not program:
        raise ValueError(describe("program", "none", "a command after --", "hvdkit run --k8s ... -- python train.py"))
    if config.np is None or config.np % config.slots_per_worker:
        expected = f"a multiple of --slots-per-worker ({config.slots_per_worker})"
        raise ValueError(describe("-np", config.np, expected, "pass e.g. -np 4"))
    if not _NAME.fullmatch(config.name):
        remedy = "write e.g. mnist-1"
        raise ValueError(describe("--name", config.name, "lower-case letters, digits and dashes, at most 42", remedy))
    if config.env:
        remedy = "put them into the manifest as `env` with `valueFrom: secretKeyRef`"
        raise ValueError(describe("--env", ", ".join(config.env), "none with --k8s", remedy))
    command = ["hvdkit", "run", "-np", str(config.np), "--hostfile", HOSTFILE]
    if config.max_restarts:
        command += ["--max-restarts", str(config.max_restarts)]
    if config.min_np is not None:
        command += ["--min-np", str(config.min_np)]
    if config.metrics_port is not None:
        command += ["--metrics-port", config.metrics_port]
    limits = {"nvidia.com/gpu": config.slots_per_worker} if config.gpu else {"cpu": config.slots_per_worker}
    return _TEMPLATE.format(
        name=json.dumps(config.name),
        slots=config.slots_per_worker,
        image=json.dumps(config.image),
        command=json.dumps([*command, "--", *program]),
        workers=config.np // config.slots_per_worker,
        limits=json.dumps(limits),
    )


def kubernetes(config: RunConfig, program: Sequence[str]) -> int | str:
    """Return the manifest for a dry run; otherwise pass it to ``kubectl create``, and return its exit code."""
    text = manifest(config, program)
    if config.dry_run:
        return text.rstrip("\n")
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        remedy = "install it, or save what --dry-run prints"
        raise ClusterError(describe("--k8s", "no kubectl", "kubectl on PATH", remedy))
    done = subprocess.run([kubectl, "create", "-f", "-"], input=text, text=True, check=False)
    if done.returncode == 0:
        labels = f"training.kubeflow.org/job-name={config.name},training.kubeflow.org/job-role=launcher"
        print(f"follow it: kubectl logs -f -l {labels}")
    return done.returncode
