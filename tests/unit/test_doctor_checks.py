"""Each check of ``hvdkit doctor`` separately: its findings for this machine's facts, and for modified facts."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from hvdkit.commands.doctor import host_checks, mpi_checks, software_checks
from hvdkit.machine.environment import outside_a_job
from hvdkit.machine.interfaces import Address
from hvdkit.machine.mpi import ROOT_VARIABLES, Mpi, MpiLauncher, identify

# --- MPI --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org", "Open MPI 4.1.8"),
        ("Open MPI v5.0.6, package: Open MPI", "Open MPI 5.0.6"),
        ("MPICH Version:      4.2.3\nMPICH Release date: Thu", "MPICH 4.2.3"),
        ("HYDRA build details:\n    Version:          5.0.2\n", "MPICH 5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701", "Intel MPI 2021.13"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", "Intel MPI 2021.13"),
        ("srun: command not found", "None"),
    ],
)
def test_identify_mpi(text, expected):
    assert str(identify(text)) == expected


def test_two_mpi_libraries_are_a_problem(here):
    other = "/opt/mpich/lib/libmpi.so.12"
    stages = {"mpi4py": {**here.mpi4py["mpi4py"], "libmpi": [other]}}
    found = mpi_checks.mpi_library(dataclasses.replace(here, mpi4py=dataclasses.replace(here.mpi4py, stages=stages)))
    assert found.status == "problem"
    assert other in found.what
    assert here.training["horovod"]["libmpi"][0] in found.remedy


@pytest.mark.parametrize(
    ("of", "status"),
    [(Mpi("MPICH", "5.0.2"), "problem"), (Mpi("Open MPI", "4.0.0"), "warning")],
)
def test_an_mpirun_of_another_mpi(here, of, status):
    assert mpi_checks.mpirun(here).status == "ok"
    foreign = dataclasses.replace(here, mpirun=MpiLauncher("/opt/bin/mpirun", True, of))
    found = mpi_checks.mpirun(foreign)
    assert found.status == status
    assert "first on PATH" in found.remedy


def test_horovodrun_with_open_mpi_5(here):
    program = MpiLauncher("/opt/bin/mpirun", True, Mpi("Open MPI", "5.0.6"))
    found = mpi_checks.horovodrun(dataclasses.replace(here, mpirun=program))
    assert found.status == "warning"
    assert "--gloo" in found.remedy


def test_import_order_is_safe_with_bound_symbols(here):
    bound = dataclasses.replace(here, environment={**here.environment, "LD_BIND_NOW": "1"})
    assert mpi_checks.import_order(bound).status == "ok"
    at_risk = here.training["tensorflow"]["exports_hwloc"] and here.library.major < 5
    unbound = {name: value for name, value in here.environment.items() if name != "LD_BIND_NOW"}
    found = mpi_checks.import_order(dataclasses.replace(here, environment=unbound))
    assert found.details["exposed"] == at_risk


@pytest.mark.parametrize(("value", "status"), [("0", "note"), ("1", "ok")])
def test_busy_wait(here, value, status):
    changed = {**here.environment, "OMPI_MCA_mpi_yield_when_idle": value}
    assert mpi_checks.busy_wait(dataclasses.replace(here, environment=changed)).status == status


def test_a_nested_launch_forgets_the_job_it_is_in():
    job = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0", "HOROVOD_RANK": "0", "OMPI_MCA_orte_ess_jobid": "1"}
    own = {"OMPI_MCA_btl_tcp_if_include": "eth0", "OMPI_ALLOW_RUN_AS_ROOT": "1", "HOROVOD_CYCLE_TIME": "2"}
    assert outside_a_job({**job, **own}) == own


# --- host and devices -------------------------------------------------------------------------------------


def test_more_ranks_than_cores(here):
    many = dataclasses.replace(here, np=10_000, environment={})
    found = host_checks.cores(many)
    assert found.status == ("warning" if here.open_mpi else "note")
    assert found.details["ranks"] == 10_000
    permitted = dataclasses.replace(many, environment={"OMPI_MCA_rmaps_base_oversubscribe": "1"})
    assert host_checks.cores(permitted).status == "note"
    assert host_checks.cores(dataclasses.replace(here, np=1)).status in ("ok", "note")


def test_shared_memory_that_is_too_small(here):
    assert host_checks.shared_memory(dataclasses.replace(here, np=10**9)).status == "warning"
    assert host_checks.shared_memory(here, path=Path("/nonexistent")).status == "warning"


def test_root_needs_two_variables(here, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert host_checks.root(here).status == "ok"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    bare = dataclasses.replace(here, environment={})
    found = host_checks.root(bare)
    assert found.status == "warning"
    allowed = dict.fromkeys(ROOT_VARIABLES, "1")
    assert all(name in found.remedy for name in allowed)
    assert host_checks.root(dataclasses.replace(here, environment=allowed)).status == "ok"


def test_the_environment_hides_secrets(here):
    variables = {"HOROVOD_CYCLE_TIME": "2", "HOROVOD_SECRET_KEY": "s3cret", "HOME": "/home/ann"}
    found = host_checks.environment(dataclasses.replace(here, environment=variables))
    assert "HOROVOD_CYCLE_TIME=2" in found.what
    assert "s3cret" not in found.what + str(found.details)
    assert "HOME" not in found.details


def test_network_never_offers_what_stays_on_the_host(here):
    interfaces = [
        Address("lo", "127.0.0.1", 0),
        Address("docker0", "172.17.0.1", 0),
        Address("virbr0", "192.168.122.1", 0),
        Address("ib0", "10.1.0.5", 100_000),
        Address("eth0", "10.0.0.5", 1_000),
    ]
    clean = dataclasses.replace(here, environment={})
    found = host_checks.network(clean, interfaces)
    assert found.status == "note"
    assert [usable["interface"] for usable in found.details["usable"]] == ["ib0", "eth0"]
    for setting in ("btl_tcp_if_include ib0", "HOROVOD_GLOO_IFACE=ib0", "NCCL_SOCKET_IFNAME=ib0"):
        assert setting in found.remedy
    chosen = dataclasses.replace(here, environment={"HOROVOD_GLOO_IFACE": "eth0"})
    assert host_checks.network(chosen, interfaces).status == "ok"
    assert host_checks.network(clean, interfaces[-1:]).status == "ok"
    assert "one host only" in host_checks.network(clean, interfaces[:1]).what


@pytest.mark.parametrize(
    ("tensorflow", "nccl", "np", "status", "remedy"),
    [
        ({"cuda": False, "gpus": []}, False, 1, "warning", "tensorflow[and-cuda]"),
        ({"cuda": True, "gpus": []}, False, 1, "warning", "CUDA_VISIBLE_DEVICES"),
        ({"cuda": True, "gpus": ["GPU:0"]}, False, 1, "warning", "hvdkit build-horovod --gpu nccl"),
        ({"cuda": True, "gpus": ["GPU:0"]}, True, 2, "warning", "-np 1"),
        ({"cuda": True, "gpus": ["GPU:0"]}, True, 1, "note", "jit_compile=False"),
    ],
)
def test_gpus(here, tmp_path, monkeypatch, tensorflow, nccl, np, status, remedy):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA A100-SXM4-40GB, 550.54'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    stages = {
        **here.training.stages,
        "tensorflow": {**here.training["tensorflow"], **tensorflow},
        "horovod": {**here.training["horovod"], "nccl": nccl},
    }
    machine = dataclasses.replace(here, np=np, training=dataclasses.replace(here.training, stages=stages))
    found = host_checks.gpus(machine)
    assert (found.status, found.details["nvidia_smi"]) == (status, ["NVIDIA A100-SXM4-40GB, 550.54"])
    assert remedy in found.remedy


# --- software ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "changes", "status"),
    [
        (software_checks.platform, {"system": "Darwin", "glibc": ""}, "problem"),
        (software_checks.platform, {"system": "Windows", "glibc": ""}, "problem"),
        (software_checks.platform, {"glibc": ""}, "problem"),
        (software_checks.python, {"python": (3, 9, 18)}, "problem"),
        (software_checks.python, {"python": (3, 15, 0)}, "warning"),
        (software_checks.python, {"python": (3, 12, 1)}, "ok"),
        (software_checks.numpy, {"installed": {}}, "problem"),
        (software_checks.horovod_tensorflow, {"built_for": {"tensorflow": "2.15.0"}}, "problem"),
        (software_checks.tensorflow, {"installed": {"tensorflow": "2.21.0", "tensorflow-cpu": "2.21.0"}}, "warning"),
    ],
)
def test_software_verdicts(here, check, changes, status):
    found = check(dataclasses.replace(here, **changes))
    assert found.status == status, found.what


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.15.1", "problem"),
        ("2.16.2", "ok"),
        ("2.21.1", "ok"),
        ("2.22.0rc0", "ok"),
        ("2.23.0rc0", "warning"),
        ("3.0.0", "warning"),
    ],
)
def test_tensorflow_versions(here, version, status):
    stages = {**here.training.stages, "tensorflow": {**here.training["tensorflow"], "version": version}}
    training = dataclasses.replace(here.training, stages=stages)
    found = software_checks.tensorflow(dataclasses.replace(here, training=training, installed={"tensorflow": version}))
    assert found.status == status, found.what


def test_two_distributions_of_keras(here):
    both = {"keras": "3.15.1", "keras-nightly": "3.16.0.dev2026102704"}
    found = software_checks.keras(dataclasses.replace(here, installed=both))
    assert found.status == "warning" and "pip uninstall -y keras keras-nightly" in found.remedy
    for name, version in both.items():
        assert software_checks.keras(dataclasses.replace(here, installed={name: version})).status == "ok"


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"version": "2.15.0"}, "keras>=3.5"),
        ({"version": "3.4.1"}, "keras>=3.5"),
        ({"backend": "jax"}, "KERAS_BACKEND=tensorflow"),
        ({"tf_keras_version": "2.18.0"}, "TF_USE_LEGACY_KERAS"),
    ],
)
def test_keras_that_would_not_average(here, changes, remedy):
    stages = {**here.training.stages, "keras": {**here.training["keras"], **changes}}
    found = software_checks.keras(dataclasses.replace(here, training=dataclasses.replace(here.training, stages=stages)))
    assert found.status == "problem"
    assert remedy in found.remedy
