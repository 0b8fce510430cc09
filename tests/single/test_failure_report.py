"""The pipe by which a rank hands the report of a failure to the wrapper that started it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.cluster import report
from hvdkit.cluster.report import VARIABLE, FailureReport

REPORT = FailureReport(rank=2, host="host-b", verb="failed", cause="ValueError: the disk is full", step=7)


@pytest.fixture
def pipe(monkeypatch):
    """A pipe as the wrapper makes it: its reader, and its writer, which children inherit."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_inheritable(writer, True)
    monkeypatch.setenv(VARIABLE, f"{writer} {os.fstat(writer).st_ino}")
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_report_is_handed_over(pipe):
    reader, writer = pipe
    mine = report._Pipe()
    mine.take()
    mine.write(REPORT)
    assert FailureReport.decode(os.read(reader, 4096)) == REPORT
    # Programs that this rank starts from now on cannot be taken for it.
    assert VARIABLE not in os.environ and not os.get_inheritable(writer)
    mine._file = None


def test_a_long_cause_is_cut():
    long = FailureReport(rank=0, host="a", verb="failed", cause="x" * 10**6)
    assert len(long.encode()) < 4096 and FailureReport.decode(long.encode()).cause.startswith("xxx")


def test_a_program_that_has_inherited_only_the_variable_writes_nothing(pipe, tmp_path):
    """Python closes descriptors when it starts a program; the number may belong to another file, or pipe, there."""
    _, writer = pipe
    source = Path(report.__file__).read_text()
    script = f"""
import os, sys
names = {{"__name__": "hvdkit.cluster.report"}}
other = os.open({str(tmp_path / "other")!r}, os.O_CREAT | os.O_RDWR)
os.dup2(other, {writer})
sys.path.insert(0, {str(Path(report.__file__).parents[2])!r})
from types import ModuleType
sys.modules["hvdkit"] = ModuleType("hvdkit"); sys.modules["hvdkit"].__path__ = []
for name in ("hvdkit.cluster", "hvdkit.cluster.logs"):
    sys.modules[name] = ModuleType(name); sys.modules[name].__path__ = []
sys.modules["hvdkit.cluster.logs"].last_line = None
import types
module = types.ModuleType("report"); sys.modules["report"] = module
exec(compile({source!r}, "report.py", "exec"), module.__dict__)
module.take_pipe()
print(module._pipe._file)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n" and (tmp_path / "other").read_bytes() == b""


@pytest.mark.parametrize("text", ["", "x", "3", "3 x", "999999 1", "-1 1"])
def test_other_values_of_the_variable_are_no_pipe(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    mine = report._Pipe()
    mine.take()
    mine.write(REPORT)
    assert mine._file is None and VARIABLE not in os.environ
