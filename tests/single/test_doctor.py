"""``hvdkit doctor``, run for real: here, and in environments that lack or break what it looks for."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

import psutil
import pytest

from hvdkit.doctor import Doctor, devices, examine, facts, host, live, mpi, process, report, software
from hvdkit.doctor.finding import Finding

ROOT = Path(__file__).parents[2]
HEAVY = ("tensorflow", "keras", "horovod", "mpi4py")
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def here() -> facts.Facts:
    """The facts of the environment that runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", ENVIRONMENT["PATH"])
        return facts.gather(np=2, timeout=120)


def make_environment(folder: Path, *absent: str) -> Path:
    """Make a virtual environment with all that is installed here, save the packages whose names start so."""
    venv.create(folder, symlinks=True)
    purelib = Path(psutil.__file__).parents[1]
    target = next((folder / "lib").glob("python3*/site-packages"))
    for entry in purelib.iterdir():
        if not entry.name.lower().startswith(absent) and not (target / entry.name).exists():
            (target / entry.name).symlink_to(entry)
    (target / "hvdkit_here.pth").write_text(str(ROOT))
    return folder / "bin/python"


def run_doctor(python: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, dict]]:
    """Run ``hvdkit doctor --json`` and return its exit code and findings."""
    result = subprocess.run(
        [python, "-m", "hvdkit", "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**ENVIRONMENT, **variables},
    )
    assert result.stdout.startswith("{"), result.stderr
    document = json.loads(result.stdout)
    assert document["exit_code"] == result.returncode
    return result.returncode, document["findings"]


# --- the whole command ------------------------------------------------------------------------------------


def test_this_environment_can_train(tmp_path):
    code, findings = run_doctor(Path(sys.executable), "-np", "1", "--timeout", "120")
    problems = {name: found for name, found in findings.items() if found["status"] == "problem"}
    assert (code, problems) == (0, {})
    for name in ("tensorflow", "horovod", "horovod-tensorflow", "mpi-library", "run-mpirun", "run-gloo"):
        assert findings[name]["status"] == "ok", findings[name]
    for launcher in ("run-mpirun", "run-gloo"):
        results = findings[launcher]["details"]["results"]
        assert [(result["size"], result["sum"]) for result in results] == [(2, 3.0)] * 2


def test_text_is_one_screen_without_colours():
    result = subprocess.run(
        [sys.executable, "-m", "hvdkit", "doctor", "--no-run"], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert "\x1b" not in result.stdout
    assert len(result.stdout.splitlines()) <= 45
    assert result.stdout.rstrip().splitlines()[-1].startswith("Training can start")


def test_with_nothing_installed_it_names_each_remedy(tmp_path):
    python = make_environment(tmp_path / "empty", *HEAVY)
    code, findings = run_doctor(python, PATH="/nonexistent")
    assert code == 1
    assert findings["tensorflow"]["status"] == "problem"
    assert "pip install 'hvdkit[cpu]'" in findings["tensorflow"]["remedy"]
    assert findings["horovod"]["status"] == "problem"
    assert findings["horovod"]["remedy"] == "hvdkit build-horovod"
    assert findings["mpi4py"]["status"] == "warning"
    assert findings["mpirun"]["status"] == "warning"
    assert findings["run-mpirun"]["status"] == findings["run-gloo"]["status"] == "note"
    assert not [name for name, found in findings.items() if "this check failed" in found["what"]]


def test_without_tensorflow_horovod_is_not_blamed(tmp_path):
    python = make_environment(tmp_path / "no-tf", "tensorflow", "keras")
    code, findings = run_doctor(python, "--no-run")
    assert code == 1
    assert [name for name, found in findings.items() if found["status"] == "problem"] == ["tensorflow"]
    assert findings["horovod"]["status"] == "note"


def test_a_horovod_built_for_another_tensorflow_is_a_problem(tmp_path):
    python = make_environment(tmp_path / "mismatch", "horovod")
    import horovod

    site = next((tmp_path / "mismatch/lib").glob("python3*/site-packages"))
    (site / "horovod").mkdir()
    for entry in Path(horovod.__file__).parent.iterdir():
        if entry.name != "metadata.json":
            (site / "horovod" / entry.name).symlink_to(entry)
    (site / "horovod/metadata.json").write_text('{"tensorflow": "2.16.2", "dummy": "none"}')
    code, findings = run_doctor(python, "--no-run")
    found = findings["horovod-tensorflow"]
    assert (code, found["status"], found["remedy"]) == (1, "problem", "hvdkit build-horovod")
    assert "2.16.2" in found["what"]
    assert found["details"]["compiled_for"] == "2.16.2"


def test_every_finding_is_documented():
    document = (ROOT / "docs/doctor.md").read_text()
    findings = examine.examine(Doctor(run=False))
    names = [finding.name for finding in findings] + ["run-mpirun", "run-gloo"]
    assert len(names) == len(set(names))
    for name in names:
        assert f"| `{name}` |" in document, name


# --- what may crash or hang -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("import time; time.sleep(600)", "did not end within"),
        ("raise OSError('libmpi.so.40: cannot open')", "OSError: libmpi.so.40"),
    ],
)
def test_an_import_that_fails_is_reported_not_suffered(tmp_path, here, body, expected):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod/__init__.py").write_text("")
    (tmp_path / "horovod/tensorflow.py").write_text(body)
    probed = facts.probe(["horovod"], timeout=5, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert not probed.loaded("horovod")
    stages = {**probed.stages, "tensorflow": here.training["tensorflow"]}
    broken = dataclasses.replace(here, training=dataclasses.replace(probed, stages=stages))
    found = software.horovod(broken)
    assert (found.status, found.remedy) == ("problem", "hvdkit build-horovod")
    assert expected in found.what


def test_a_launcher_that_hangs_is_ended_with_its_ranks():
    script = f"{sys.executable} -c 'import time; time.sleep(600)' & echo $!; wait"
    started = time.monotonic()
    outcome = process.run(["sh", "-c", script], timeout=1)
    assert outcome.code is None
    assert time.monotonic() - started < 20
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(outcome.stdout)).status() == psutil.STATUS_ZOMBIE


def test_a_command_that_does_not_exist_is_an_outcome():
    outcome = process.run(["/nonexistent/mpirun"], timeout=5)
    assert outcome.code == 127
    assert "/nonexistent/mpirun" in outcome.stderr


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
    assert str(facts.identify_mpi(text)) == expected


def test_two_mpi_libraries_are_a_problem(here):
    other = "/opt/mpich/lib/libmpi.so.12"
    stages = {"mpi4py": {**here.mpi4py["mpi4py"], "libmpi": [other]}}
    found = mpi.mpi_library(dataclasses.replace(here, mpi4py=dataclasses.replace(here.mpi4py, stages=stages)))
    assert found.status == "problem"
    assert other in found.what
    assert here.training["horovod"]["libmpi"][0] in found.remedy


@pytest.mark.parametrize(
    ("of", "status"),
    [(facts.Mpi("MPICH", "5.0.2"), "problem"), (facts.Mpi("Open MPI", "4.0.0"), "warning")],
)
def test_an_mpirun_of_another_mpi(here, of, status):
    assert mpi.mpirun(here).status == "ok"
    foreign = dataclasses.replace(here, mpirun=facts.Program("/opt/bin/mpirun", True, of))
    found = mpi.mpirun(foreign)
    assert found.status == status
    assert "first on PATH" in found.remedy


def test_horovodrun_with_open_mpi_5(here):
    program = facts.Program("/opt/bin/mpirun", True, facts.Mpi("Open MPI", "5.0.6"))
    found = mpi.horovodrun(dataclasses.replace(here, mpirun=program))
    assert found.status == "warning"
    assert "--gloo" in found.remedy


def test_import_order_is_safe_with_bound_symbols(here):
    bound = dataclasses.replace(here, environment={**here.environment, "LD_BIND_NOW": "1"})
    assert mpi.import_order(bound).status == "ok"
    at_risk = here.training["tensorflow"]["exports_hwloc"] and here.library.major < 5
    unbound = {name: value for name, value in here.environment.items() if name != "LD_BIND_NOW"}
    found = mpi.import_order(dataclasses.replace(here, environment=unbound))
    assert found.details["exposed"] == at_risk


@pytest.mark.parametrize(("value", "status"), [("0", "note"), ("1", "ok")])
def test_busy_wait(here, value, status):
    changed = {**here.environment, "OMPI_MCA_mpi_yield_when_idle": value}
    assert mpi.busy_wait(dataclasses.replace(here, environment=changed)).status == status


def test_a_nested_launch_forgets_the_job_it_is_in():
    job = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0", "HOROVOD_RANK": "0", "OMPI_MCA_orte_ess_jobid": "1"}
    own = {"OMPI_MCA_btl_tcp_if_include": "eth0", "OMPI_ALLOW_RUN_AS_ROOT": "1", "HOROVOD_CYCLE_TIME": "2"}
    assert facts.outside_a_job({**job, **own}) == own


# --- live ------------------------------------------------------------------------------------------------


def write_launcher(folder: Path, body: str) -> facts.Program:
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return facts.Program(str(path), True, facts.Mpi("Open MPI", "4.1.8"))


def test_a_failed_start_shows_its_last_lines_and_a_remedy(here, tmp_path):
    message = "There are not enough slots available in the system"
    broken = dataclasses.replace(here, mpirun=write_launcher(tmp_path, f"echo '{message}' >&2; exit 1"))
    found = live.run_mpirun(broken, timeout=30)
    assert (found.status, found.remedy) == ("problem", "mpirun --oversubscribe")
    assert message in found.what and "exit code 1" in found.what


def test_a_start_that_hangs_is_reported(here, tmp_path):
    hanging = dataclasses.replace(here, mpirun=write_launcher(tmp_path, "sleep 600"))
    found = live.run_mpirun(hanging, timeout=1)
    assert found.status == "problem"
    assert "did not end within 1 s" in found.what


def test_a_launcher_of_another_mpi_makes_every_process_rank_0_of_1(here, tmp_path):
    """Two processes that no MPI joins: what a foreign mpirun does."""
    prefix = facts.mpi_prefix(here.mpi4py["mpi4py"])
    body = f'export OPAL_PREFIX={prefix}; shift 3; "$@"; "$@"'
    found = live.run_mpirun(dataclasses.replace(here, mpirun=write_launcher(tmp_path, body)), timeout=120)
    assert found.status == "problem"
    assert "rank 0 of 1" in found.what
    assert [result["size"] for result in found.details["results"]] == [1, 1]


# --- host and devices -------------------------------------------------------------------------------------


def test_more_ranks_than_cores(here):
    many = dataclasses.replace(here, np=10_000, environment={})
    found = host.cores(many)
    assert found.status == ("warning" if here.open_mpi else "note")
    assert found.details["ranks"] == 10_000
    permitted = dataclasses.replace(many, environment={"OMPI_MCA_rmaps_base_oversubscribe": "1"})
    assert host.cores(permitted).status == "note"
    assert host.cores(dataclasses.replace(here, np=1)).status in ("ok", "note")


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/pod/box", {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "50000 100000"}, 0.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {}, None),
        ("2:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3.0),
        ("2:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1"}, None),
        ("3:cpuset:/", {"cpuset/cpu.max": "50000 100000"}, None),
    ],
)
def test_cgroup_quota(tmp_path, lines, files, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines + "\n")
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    assert host.cgroup_cpus(tmp_path) == expected


def test_shared_memory_that_is_too_small(here):
    assert host.shared_memory(dataclasses.replace(here, np=10**9)).status == "warning"
    assert host.shared_memory(here, path=Path("/nonexistent")).status == "warning"


def test_root_needs_two_variables(here, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert host.root(here).status == "ok"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    bare = dataclasses.replace(here, environment={})
    found = host.root(bare)
    assert found.status == "warning"
    allowed = dict.fromkeys(host.ROOT_VARIABLES, "1")
    assert all(name in found.remedy for name in allowed)
    assert host.root(dataclasses.replace(here, environment=allowed)).status == "ok"


def test_the_environment_hides_secrets(here):
    variables = {"HOROVOD_CYCLE_TIME": "2", "HOROVOD_SECRET_KEY": "s3cret", "HOME": "/home/ann"}
    found = host.environment(dataclasses.replace(here, environment=variables))
    assert "HOROVOD_CYCLE_TIME=2" in found.what
    assert "s3cret" not in found.what + str(found.details)
    assert "HOME" not in found.details


def test_network_never_offers_what_stays_on_the_host(here):
    interfaces = [
        devices.Interface("lo", "127.0.0.1", 0),
        devices.Interface("docker0", "172.17.0.1", 0),
        devices.Interface("virbr0", "192.168.122.1", 0),
        devices.Interface("ib0", "10.1.0.5", 100_000),
        devices.Interface("eth0", "10.0.0.5", 1_000),
    ]
    clean = dataclasses.replace(here, environment={})
    found = devices.network(clean, interfaces)
    assert found.status == "note"
    assert [usable["name"] for usable in found.details["usable"]] == ["ib0", "eth0"]
    for setting in ("btl_tcp_if_include ib0", "HOROVOD_GLOO_IFACE=ib0", "NCCL_SOCKET_IFNAME=ib0"):
        assert setting in found.remedy
    chosen = dataclasses.replace(here, environment={"HOROVOD_GLOO_IFACE": "eth0"})
    assert devices.network(chosen, interfaces).status == "ok"
    assert devices.network(clean, interfaces[-1:]).status == "ok"
    assert "one host only" in devices.network(clean, interfaces[:1]).what


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
    found = devices.gpus(machine)
    assert (found.status, found.details["nvidia_smi"]) == (status, ["NVIDIA A100-SXM4-40GB, 550.54"])
    assert remedy in found.remedy


# --- software ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "changes", "status"),
    [
        (software.platform, {"system": "Darwin", "glibc": ""}, "problem"),
        (software.platform, {"system": "Windows", "glibc": ""}, "problem"),
        (software.platform, {"glibc": ""}, "problem"),
        (software.python, {"python": (3, 9, 18)}, "problem"),
        (software.python, {"python": (3, 14, 0)}, "warning"),
        (software.python, {"python": (3, 12, 1)}, "ok"),
        (software.numpy, {"installed": {}}, "problem"),
        (software.horovod_tensorflow, {"built_for": {"tensorflow": "2.15.0"}}, "problem"),
        (software.tensorflow, {"installed": {"tensorflow": "2.21.0", "tensorflow-cpu": "2.21.0"}}, "warning"),
    ],
)
def test_software_verdicts(here, check, changes, status):
    found = check(dataclasses.replace(here, **changes))
    assert found.status == status, found.what


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.15.1", "problem"), ("2.16.2", "ok"), ("2.21.1", "ok"), ("2.22.0rc1", "warning"), ("3.0.0", "warning")],
)
def test_tensorflow_versions(here, version, status):
    stages = {**here.training.stages, "tensorflow": {**here.training["tensorflow"], "version": version}}
    training = dataclasses.replace(here.training, stages=stages)
    found = software.tensorflow(dataclasses.replace(here, training=training, installed={"tensorflow": version}))
    assert found.status == status, found.what


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"version": "2.15.0"}, "keras>=3"),
        ({"backend": "jax"}, "KERAS_BACKEND=tensorflow"),
        ({"tf_keras_version": "2.18.0"}, "TF_USE_LEGACY_KERAS"),
    ],
)
def test_keras_that_would_not_average(here, changes, remedy):
    stages = {**here.training.stages, "keras": {**here.training["keras"], **changes}}
    found = software.keras(dataclasses.replace(here, training=dataclasses.replace(here.training, stages=stages)))
    assert found.status == "problem"
    assert remedy in found.remedy


# --- report -----------------------------------------------------------------------------------------------


def test_a_check_that_fails_is_itself_a_finding(here, monkeypatch):
    monkeypatch.delenv("HVDKIT_DEBUG", raising=False)

    def broken_check(known: facts.Facts) -> Finding:
        raise OSError("no such device")

    found = examine._guarded(broken_check, here)
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
