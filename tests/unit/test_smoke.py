"""``hvdkit doctor --smoke``: which jobs it starts, and what counts as passed; `make smoke` runs the jobs."""

from __future__ import annotations

import errno
import os
import socket
import sys

from hvdkit.commands.doctor import smoke
from hvdkit.commands.doctor.smoke_program import PROGRAMS
from hvdkit.commands.run.engine_choice import EngineFacts
from hvdkit.machine.mpi import Mpi, MpiLauncher
from hvdkit.machine.subprocesses import Outcome


def outcome(code, text):
    return Outcome(code, text, "", 1.0)


def facts(*, horovodrun=True, mpi=True, vendor="Open MPI"):
    """Return the facts of an environment with these launchers."""
    made = EngineFacts()
    made.__dict__["built_mpi"] = mpi
    made.__dict__["mpirun"] = MpiLauncher("/bin/mpirun", True, Mpi(vendor, "4.1"))
    made.__dict__["horovodrun"] = MpiLauncher("/bin/horovodrun", True) if horovodrun else None
    return made


def test_jobs_use_the_launchers_that_are_found(tmp_path):
    listed = smoke.jobs(tmp_path, facts())
    assert [job.launcher[0] for job in listed] == ["/bin/horovodrun", "/bin/mpirun", "/bin/mpirun", sys.executable]
    assert {job.program[0] for job in listed} == set(PROGRAMS)
    sizes = {job.program[0]: job.launcher[job.launcher.index("-np") + 1] for job in listed}
    assert sizes["systems"] != sizes["line"], "the checkpoint is continued at another number of ranks"
    assert "--oversubscribe" in listed[1].launcher
    assert "--oversubscribe" not in smoke.jobs(tmp_path, facts(vendor="MPICH"))[1].launcher
    for job in smoke.jobs(tmp_path, facts(mpi=False))[:3]:
        assert job.launcher[:2] == ("/bin/horovodrun", "--gloo")


def test_without_a_launcher_it_names_the_remedy(monkeypatch, capsys):
    monkeypatch.setattr(smoke, "EngineFacts", lambda: facts(horovodrun=False))
    assert smoke.smoke(timeout=60) == 1
    text = capsys.readouterr().out
    assert "hvdkit build-horovod" in text and text.endswith("0 passed, 1 failed\n")


def test_without_ports_it_starts_nothing(monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert smoke.smoke(timeout=60) == 1
    text = capsys.readouterr().out
    assert text.startswith("FAILED ranks cannot connect to each other on 127.0.0.1 (") and "loopback" in text
    assert text.endswith("0 passed, 1 failed\n")


def test_a_job_passes_only_with_its_words_and_the_right_exit_code():
    check = smoke.SmokeJob(shows="", launcher=(), program=(), words=("passed on 2 ranks",))
    assert check.problem(outcome(0, "smoke: fit passed on 2 ranks")) is None
    assert check.problem(outcome(1, "smoke: fit passed on 2 ranks")) == "the job ended with exit code 1"
    assert "lacks" in str(check.problem(outcome(0, "passed on 1 ranks")))
    killed = smoke.SmokeJob(shows="", launcher=(), program=(), words=("rank 1",), fails=True)
    assert killed.problem(outcome(137, "rank 1 was killed")) is None
    assert killed.problem(outcome(0, "rank 1 was killed")) == "the job ended with exit code 0"
    assert "did not end" in str(killed.problem(outcome(None, "rank 1 was killed")))


def test_a_failed_job_shows_its_last_lines_and_its_command(monkeypatch, capsys):
    program = (sys.executable, "-c", "import sys; print('the cause'); sys.exit(3)")
    job = smoke.SmokeJob(shows="a job", launcher=program, program=(), words=())
    monkeypatch.setattr(smoke, "_PROGRAM", ())
    monkeypatch.setattr(smoke, "jobs", lambda folder, facts: [job])
    assert smoke.smoke(timeout=60) == 1
    text = capsys.readouterr().out
    assert "| the cause" in text and "exit code 3" in text and "to run it again:" in text
    assert text.endswith("0 passed, 1 failed\n")
