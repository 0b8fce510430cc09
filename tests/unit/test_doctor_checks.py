"""Each check of ``hvdkit doctor`` separately: its findings for this machine's facts, and for modified facts."""

from __future__ import annotations

import dataclasses
import io
import os
import re
from pathlib import Path

import pytest
from helpers.speed import WAIT

from hvdkit.commands.doctor import examine, facts, host_checks, mpi_checks, report, software_checks
from hvdkit.commands.doctor.finding import Finding
from hvdkit.machine import subprocesses
from hvdkit.machine.environment import outside_a_job
from hvdkit.machine.interfaces import Address
from hvdkit.machine.mpi import ROOT_VARIABLES, Mpi, MpiLauncher, identify

# --- MPI --------------------------------------------------------------------------------------------------


def test_identify_mpi():
    for text, expected in (
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org", "Open MPI 4.1.8"),
        ("Open MPI v5.0.6, package: Open MPI", "Open MPI 5.0.6"),
        ("MPICH Version:      4.2.3\nMPICH Release date: Thu", "MPICH 4.2.3"),
        ("HYDRA build details:\n    Version:          5.0.2\n", "MPICH 5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701", "Intel MPI 2021.13"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", "Intel MPI 2021.13"),
        ("srun: command not found", "None"),
    ):
        assert str(identify(text)) == expected, text


@pytest.mark.full
def test_two_mpi_libraries_are_a_problem(here):
    other = "/opt/mpich/lib/libmpi.so.12"
    stages = {"mpi4py": {**here.mpi4py["mpi4py"], "libmpi": [other]}}
    found = mpi_checks.mpi_library(dataclasses.replace(here, mpi4py=dataclasses.replace(here.mpi4py, stages=stages)))
    assert found.status == "problem"
    assert other in found.what
    assert here.training["horovod"]["libmpi"][0] in found.remedy


@pytest.mark.full
def test_an_mpirun_of_another_mpi(here):
    assert mpi_checks.mpirun(here).status == "ok"
    for of, status in ((Mpi("MPICH", "5.0.2"), "problem"), (Mpi("Open MPI", "4.0.0"), "warning")):
        found = mpi_checks.mpirun(dataclasses.replace(here, mpirun=MpiLauncher("/opt/bin/mpirun", True, of)))
        assert found.status == status and "first on PATH" in found.remedy, of


@pytest.mark.full
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


def test_busy_wait(here):
    for value, status in (("0", "note"), ("1", "ok")):
        changed = {**here.environment, "OMPI_MCA_mpi_yield_when_idle": value}
        assert mpi_checks.busy_wait(dataclasses.replace(here, environment=changed)).status == status


def test_a_nested_launch_forgets_the_job_it_is_in():
    job = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0", "HOROVOD_RANK": "0", "OMPI_MCA_orte_ess_jobid": "1"}
    job |= {"OMPI_MCA_ess": "pmi", "OMPI_MCA_pmix": "^s1"}  # the first is set by MPI_Init
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


def with_stages(here, **changes):
    """Return the facts with changes of some stages of the probe."""
    stages = {**here.training.stages, **{name: {**here.training[name], **changes[name]} for name in changes}}
    return dataclasses.replace(here, training=dataclasses.replace(here.training, stages=stages))


def test_gpus(here, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA A100-SXM4-40GB, 550.54'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for cuda, gpus, nccl, np, status, remedy in (
        (False, [], False, 1, "warning", "tensorflow[and-cuda]"),
        (True, [], False, 1, "warning", "CUDA_VISIBLE_DEVICES"),
        (True, ["GPU:0"], False, 1, "warning", "hvdkit build-horovod --gpu nccl"),
        (True, ["GPU:0"], True, 2, "warning", "-np 1"),
        (True, ["GPU:0"], True, 1, "note", "jit_compile=False"),
    ):
        machine = with_stages(here, tensorflow={"cuda": cuda, "gpus": gpus}, horovod={"nccl": nccl})
        found = host_checks.gpus(dataclasses.replace(machine, np=np))
        assert found.details["nvidia_smi"] == ["NVIDIA A100-SXM4-40GB, 550.54"]
        assert found.status == status and remedy in found.remedy, remedy


# --- software ---------------------------------------------------------------------------------------------


def test_software_verdicts(here):
    both = {"tensorflow": "2.21.0", "tensorflow-cpu": "2.21.0"}
    for check, changes, status in (
        (software_checks.platform, {"system": "Darwin", "glibc": ""}, "problem"),
        (software_checks.platform, {"system": "Windows", "glibc": ""}, "problem"),
        (software_checks.platform, {"glibc": ""}, "problem"),
        (software_checks.python, {"python": (3, 9, 18)}, "problem"),
        (software_checks.python, {"python": (3, 15, 0)}, "warning"),
        (software_checks.python, {"python": (3, 12, 1)}, "ok"),
        (software_checks.numpy, {"installed": {}}, "problem"),
        (software_checks.horovod_tensorflow, {"built_for": {"tensorflow": "2.15.0"}}, "problem"),
        (software_checks.tensorflow, {"installed": both}, "warning"),
    ):
        found = check(dataclasses.replace(here, **changes))
        assert found.status == status, (changes, found.what)


def test_tensorflow_versions(here):
    for version, status in (
        ("2.15.1", "problem"),
        ("2.16.2", "ok"),
        ("2.21.1", "ok"),
        ("2.22.0rc0", "ok"),
        ("2.23.0rc0", "warning"),
        ("3.0.0", "warning"),
    ):
        machine = with_stages(here, tensorflow={"version": version})
        found = software_checks.tensorflow(dataclasses.replace(machine, installed={"tensorflow": version}))
        assert found.status == status, (version, found.what)


def test_two_distributions_of_keras(here):
    both = {"keras": "3.15.1", "keras-nightly": "3.16.0.dev2026102704"}
    found = software_checks.keras(dataclasses.replace(here, installed=both))
    assert found.status == "warning" and "pip uninstall -y keras keras-nightly" in found.remedy
    for name, version in both.items():
        assert software_checks.keras(dataclasses.replace(here, installed={name: version})).status == "ok"


def test_keras_that_would_not_average(here):
    for changes, remedy in (
        ({"version": "2.15.0"}, "keras>=3.5"),
        ({"version": "3.4.1"}, "keras>=3.5"),
        ({"backend": "jax"}, "KERAS_BACKEND=tensorflow"),
        ({"tf_keras_version": "2.18.0"}, "TF_USE_LEGACY_KERAS"),
    ):
        found = software_checks.keras(with_stages(here, keras=changes))
        assert found.status == "problem" and remedy in found.remedy, changes


# --- report -----------------------------------------------------------------------------------------------


def test_a_check_that_fails_is_itself_a_finding(here, monkeypatch):
    monkeypatch.delenv("HVDKIT_DEBUG", raising=False)

    def broken_check(known: facts.Facts) -> Finding:
        raise OSError("no such device")

    found = examine._run_check(broken_check, here)
    assert (found.name, found.status) == ("broken-check", "warning")
    assert "OSError: no such device" in found.what


def test_a_problem_needs_a_remedy():
    with pytest.raises(ValueError, match="no remedy"):
        Finding("x", "problem", "broken")


def test_text_marks_and_remedies():
    stream = io.StringIO()
    findings = [Finding("a", "ok", "[1] fine"), Finding("b", "problem", "broken", "pip install x[y]")]
    report.print_text(findings, stream)
    shown = re.sub(r" +\n", "\n", stream.getvalue())
    assert shown == (
        "ok   a [1] fine\nFAIL b broken\n       -> pip install x[y]\nTraining cannot start: 1 problem, 0 warnings.\n"
    )
    assert report.exit_code(findings) == 1
    assert report.exit_code(findings[:1]) == 0


def test_a_command_that_does_not_exist_is_an_outcome():
    outcome = subprocesses.run(["/nonexistent/mpirun"], timeout=WAIT)
    assert outcome.code == 127
    assert "/nonexistent/mpirun" in outcome.stderr
