"""The tool behind docs/compatibility.md: how it reads outcomes, and what it changes in the document."""

from __future__ import annotations

import subprocess
import sys

import compatibility
import run as runner
from compatibility import DOCUMENT, ROWS, Result, Row, interpreter, read_outcome, update
from helpers import speed
from helpers.outcomes import Launch

OUTPUT = """\
np=2, MPI ...
np=2, MPI    1 passed, 2 failed in 3.0 s

===== FAILED tests/parallel/test_fit.py::test_a[x y] [np=2, MPI] on rank 0, 1 of 2 =====
[rank 0] E   ValueError: no
FAILED tests/parallel/test_fit.py::test_a[x y] [np=2, MPI] - rank 0 (and rank 1): ValueError: no
FAILED np=2, MPI: ended by signal SIGKILL [np=2, MPI] - rank 1: in: test_b
1 passed, 2 failed
"""
FAILURES = ["tests/parallel/test_fit.py::test_a[x y]", "np=2, MPI: ended by signal SIGKILL"]
FIRST, SECOND = ROWS[:2]


def result(row: Row, last: str, failures: list[str]) -> dict[str, Result]:
    line = f"{row.cells} 3.15.1 | 2.5.5 | GCC 12.2.0 | 7 s | works | works | works | {last} |\n"
    return {row.cells: Result(line=line, failures=failures)}


def test_a_failed_run_names_its_tests():
    assert read_outcome(OUTPUT) == ("1 passed, 2 failed", FAILURES)
    assert read_outcome("np=2, MPI ...\nTraceback\n") == ("**fails**: the tests did not end", [])
    assert read_outcome("") == ("**fails**: the tests did not end", [])


# What a rank's recorder writes: a test that passes, and one that fails.
RECORDS = """
import json, os, pathlib
lines = [{"test": "t::a", "outcome": "passed"}, {"test": "t::b", "outcome": "failed", "detail": "E no"}, {"ended": 1}]
text = "".join(json.dumps(line) + "\\n" for line in lines)
pathlib.Path(os.environ["HVDKIT_TEST_RECORDS"], "rank-0.jsonl").write_text(text)
"""


def test_the_last_lines_of_the_runner_are_read(monkeypatch, capsys):
    """The runner as it is, with a launch that takes no time."""
    command = [sys.executable, "-c", RECORDS]
    monkeypatch.setattr(runner, "launches", lambda config, folder: [Launch("np=1, MPI", 1, command, folder / "1")])
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    monkeypatch.setattr(speed, "measure", lambda: 1.0)
    monkeypatch.setenv(speed.VARIABLE, "1")
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert runner.main() == 1
    assert read_outcome(capsys.readouterr().out) == ("1 passed, 1 failed", ["t::b"])


def test_failing_tests_are_listed_until_their_row_passes():
    before = DOCUMENT.read_text(encoding="utf-8")
    failing = update(before, result(FIRST, "1 passed, 2 failed", FAILURES))
    listed = [line for line in failing.splitlines() if line.startswith("- TensorFlow")]
    assert len(listed) >= 2 and all(any(f"`{name}`" in line for line in listed) for name in FAILURES)
    other = update(failing, result(SECOND, "3 passed, 0 failed", []))
    assert "3 passed, 0 failed" in other and all(line in other.splitlines() for line in listed)
    after = update(other, result(FIRST, "3 passed, 0 failed", []))
    assert not any(f"`{name}`" in after for name in FAILURES)
    rows = [line for line in before.splitlines() if line.startswith("| 2.")]
    kept = [line for line in rows if not line.startswith((FIRST.cells, SECOND.cells))]
    assert [line for line in after.splitlines() if line in kept] == kept


def test_an_update_without_results_changes_only_the_name_of_the_machine():
    before = DOCUMENT.read_text(encoding="utf-8").splitlines()
    after = update(DOCUMENT.read_text(encoding="utf-8"), {}).splitlines()
    changed = [line for line in before if line not in after]
    assert len(before) == len(after) and all(line.startswith("Measured on ") for line in changed)


def test_this_python_is_found():
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = interpreter(version)
    assert found is not None
    run = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"Python {version}.")


def test_linters_are_not_installed_for_the_tests():
    wanted = compatibility.contract_requirements()
    assert {"pytest", "safetensors"} <= {*wanted} and not {*wanted} & compatibility.LINTERS
