"""Run ``hvdkit doctor`` here, and in environments with missing or broken parts."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
from pathlib import Path

import pytest
from helpers.environments import environment_without
from helpers.jobs import call, words
from helpers.speed import WAIT, slowdown

from hvdkit.commands.doctor import facts, live_checks, report, software_checks
from hvdkit.commands.doctor.finding import Finding
from hvdkit.machine import subprocesses
from hvdkit.machine.mpi import Mpi, MpiLauncher

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("tensorflow", "keras", "horovod", "mpi4py")
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run_doctor(python: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, dict]]:
    """Run ``hvdkit doctor --json`` and return its exit code and findings."""
    result = call([python, "-m", "hvdkit", "doctor", "--json", *arguments], env={**ENVIRONMENT, **variables})
    assert result.stdout.startswith("{"), result.stderr
    document = json.loads(result.stdout)
    assert document["exit_code"] == result.returncode
    assert sum(document["counts"].values()) == len(document["findings"])  # names are unique
    return result.returncode, document["findings"]


# --- the whole command ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> tuple[int, dict[str, dict]]:
    """Return exit code and findings of the whole command in the environment that runs the tests."""
    return run_doctor(Path(sys.executable), "-np", "1", "--timeout", f"{WAIT:g}")


@pytest.mark.nightly
def test_this_environment_can_train(whole):
    code, findings = whole
    problems = {name: found for name, found in findings.items() if found["status"] == "problem"}
    assert (code, problems) == (0, {})
    for name in ("tensorflow", "horovod", "horovod-tensorflow", "mpi-library", "run-mpirun", "run-gloo"):
        assert findings[name]["status"] == "ok", findings[name]
    for launcher in ("run-mpirun", "run-gloo"):
        results = findings[launcher]["details"]["results"]
        assert [(result["size"], result["sum"]) for result in results] == [(2, 3.0)] * 2


def test_text_is_one_screen_without_colours(whole):
    findings = [Finding(name, f["status"], f["what"], f["remedy"], f["details"]) for name, f in whole[1].items()]
    stream = io.StringIO()
    report.print_text(findings, stream)
    shown = stream.getvalue()
    assert "\x1b" not in shown
    assert len(shown.splitlines()) <= 45
    assert shown.rstrip().splitlines()[-1].startswith("Training can start")


@pytest.mark.core
def test_with_nothing_installed_it_names_each_remedy(tmp_path):
    python = environment_without(tmp_path / "empty", *HEAVY)
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
    python = environment_without(tmp_path / "no-tf", "tensorflow", "keras")
    code, findings = run_doctor(python, "--no-run")
    assert code == 1
    assert [name for name, found in findings.items() if found["status"] == "problem"] == ["tensorflow"]
    assert findings["horovod"]["status"] == "note"


def test_a_horovod_built_for_another_tensorflow_is_a_problem(tmp_path):
    python = environment_without(tmp_path / "mismatch", "horovod")
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


def test_every_finding_is_documented(whole):
    document = (ROOT / "docs/doctor.md").read_text()
    assert {"python", "run-mpirun", "run-gloo"} <= set(whole[1])
    for name in whole[1]:
        assert f"| `{name}` |" in document, name


# --- checks that may crash or hang ------------------------------------------------------------------------


def test_an_import_that_fails_is_reported_not_suffered(tmp_path, here):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod/__init__.py").write_text("")
    for body, expected in (
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("import time; time.sleep(600)", "did not end within"),
        ("raise OSError('libmpi.so.40: cannot open')", "OSError: libmpi.so.40"),
    ):
        (tmp_path / "horovod/tensorflow.py").write_text(body)
        probed = facts.probe(["horovod"], timeout=5 * slowdown(), env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
        assert not probed.loaded("horovod"), body
        stages = {**probed.stages, "tensorflow": here.training["tensorflow"]}
        broken = dataclasses.replace(here, training=dataclasses.replace(probed, stages=stages))
        found = software_checks.horovod(broken)
        assert (found.status, found.remedy) == ("problem", "hvdkit build-horovod"), body
        assert expected in found.what, body


def test_a_launcher_that_hangs_is_ended_with_its_ranks():
    script = f"{sys.executable} -c 'import time; time.sleep(100000)' & echo $!; wait"
    outcome = subprocesses.run(["sh", "-c", script], timeout=slowdown())
    assert outcome.code is None
    assert not words(int(outcome.stdout))


# --- live ------------------------------------------------------------------------------------------------


def write_launcher(folder: Path, body: str) -> MpiLauncher:
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return MpiLauncher(str(path), True, Mpi("Open MPI", "4.1.8"))


def test_a_failed_start_shows_its_last_lines_and_a_remedy(here, tmp_path):
    message = "There are not enough slots available in the system"
    broken = dataclasses.replace(here, mpirun=write_launcher(tmp_path, f"echo '{message}' >&2; exit 1"))
    found = live_checks.run_mpirun(broken, timeout=WAIT)
    assert (found.status, found.remedy) == ("problem", "mpirun --oversubscribe")
    assert message in found.what and "exit code 1" in found.what


def test_a_start_that_hangs_is_reported(here, tmp_path):
    hanging = dataclasses.replace(here, mpirun=write_launcher(tmp_path, "sleep 100000"))
    found = live_checks.run_mpirun(hanging, timeout=1)
    assert found.status == "problem"
    assert "did not end within 1 s" in found.what


@pytest.mark.nightly
def test_a_launcher_of_another_mpi_makes_every_process_rank_0_of_1(here, tmp_path):
    """Start two processes that MPI does not connect, as a foreign mpirun does."""
    prefix = facts.mpi_prefix(here.mpi4py["mpi4py"])
    body = f'export OPAL_PREFIX={prefix}; shift 3; "$@"; "$@"'
    found = live_checks.run_mpirun(dataclasses.replace(here, mpirun=write_launcher(tmp_path, body)), timeout=WAIT)
    assert found.status == "problem"
    assert "rank 0 of 1" in found.what
    assert [result["size"] for result in found.details["results"]] == [1, 1]


def test_by_which_algorithm_messages_are_added_up(here):
    found = live_checks.allreduce(here, timeout=WAIT)
    assert (found.status, found.details["large"]) == ("ok", "ring"), found.what
    chosen = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "1"}
    found = live_checks.allreduce(dataclasses.replace(here, environment=dict(here.environment) | chosen), timeout=WAIT)
    assert (found.status, found.details["small"]) == ("note", "one rank after the other"), found.what
    assert found.remedy
