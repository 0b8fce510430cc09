"""The runner of these tests: a launch may take any time while its tests end; if none ends, it is hung."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading

import psutil
import pytest
import run as runner
from helpers.jobs import words
from helpers.outcomes import VERDICT, Launch, reason, report
from helpers.speed import WAIT, slowdown, wait_until
from helpers.time_limit import UNTIL

# Like a rank's recorder: a test starts and ends every ``each`` seconds; the last one takes ``last`` seconds more.
TESTS = """
import json, os, pathlib, sys, time
each, last = map(float, sys.argv[1:])
with (pathlib.Path(os.environ["HVDKIT_TEST_RECORDS"]) / "rank-0.jsonl").open("a") as file:
    for number in range(10):
        print(json.dumps({"started": f"t{number}"}), file=file, flush=True)
        time.sleep(each + (last if number == 9 else 0))
        print(json.dumps({"test": f"t{number}", "outcome": "passed", "seconds": each}), file=file, flush=True)
    print(json.dumps({"ended": 0}), file=file, flush=True)
"""


def launched(folder, each, last, stall):
    """Return a launch of ten tests after it has ended; seconds are multiplied by the machine's slowdown."""
    seconds = [str(slowdown() * value) for value in (each, last)]
    launch = Launch("here", 1, [sys.executable, "-c", TESTS, *seconds], folder / "records")
    runner.run(launch, slowdown() * stall)
    return launch


@pytest.mark.full
def test_a_launch_whose_tests_end_may_take_longer_than_the_limit(tmp_path):
    launch = launched(tmp_path, 0.3, 0, stall=2)
    assert launch.seconds > 2 * slowdown()
    assert launch.passed == [f"t{number}" for number in range(10)] and not launch.failures


@pytest.mark.full
def test_a_launch_in_which_no_test_ends_is_ended_and_says_in_which_test(tmp_path):
    launch = launched(tmp_path, 0.01, 600, stall=2)
    assert len(launch.passed) == 9 and len(launch.failures) == 1
    assert "hung: no test ended for" in report(launch) and "in: t9" in report(launch)


def test_a_launch_that_the_user_ends_keeps_what_has_passed(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "STOP", threading.Event())
    records = tmp_path / "records/rank-0.jsonl"

    def stop():
        wait_until(lambda: records.exists() and '"t1", "outcome"' in records.read_text())
        records.with_name(VERDICT).write_text("rank 1 was terminated\n")
        runner.STOP.set()

    user = threading.Thread(target=stop)
    user.start()
    launch = launched(tmp_path, 0.1, 600, stall=600)
    user.join()
    assert launch.interrupted and launch.passed[:2] == ["t0", "t1"] and not launch.failures


def test_every_rank_has_to_pass_and_a_test_counts_once(tmp_path):
    """Rank 0 passes both tests; rank 1 fails one, and ends in the middle of the launch's last test."""
    lines = {
        0: [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "passed"}, {"ended": 0}],
        1: [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "failed", "detail": "E no"}, {"started": "c"}],
    }
    for rank, written in lines.items():
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in written))
    (tmp_path / VERDICT).write_text("rank 1 is late\n")
    launch = Launch("np=2", 2, [], tmp_path, exit_code=-9)
    launch.read()
    ended = "np=2: ended by signal SIGKILL"
    assert launch.passed == ["a"] and list(launch.failures) == ["b", ended, "the watchdog"]
    assert launch.failures["b"] == {1: "E no"} and "in: c" in launch.failures[ended][1]
    assert reason(launch.failures["the watchdog"]) == "rank 0: rank 1 is late"


def test_ranks_that_waited_long_and_then_passed_have_not_failed(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank-{rank}.jsonl").write_text('{"test": "a", "outcome": "passed"}\n{"ended": 0}\n')
    (tmp_path / VERDICT).write_text("[rank 1] has waited for rank 0 for 30 s in barrier()\n")
    launch = Launch("np=2", 2, [], tmp_path, exit_code=0)
    launch.read()
    assert launch.passed == ["a"] and not launch.failures
    assert report(launch) == "  the watchdog wrote:\n[rank 1] has waited for rank 0 for 30 s in barrier()"


@pytest.mark.full
def test_no_test_begins_after_the_limit(tmp_path, monkeypatch):
    monkeypatch.setenv(UNTIL, "0")
    command = [sys.executable, "-m", "pytest", "--tier", "core", "tests/unit/test_layers.py"]
    launch = Launch("unit", 1, command, tmp_path / "records")
    runner.run(launch, WAIT)
    assert set(launch.skipped.values()) == {"Skipped: no time was left: see --limit of tests/run.py"}
    assert not launch.passed and not launch.failures


ENDS = """
import os, sys, pytest
class Ends:
    def pytest_runtest_makereport(self, item):
        if item.name == sys.argv[1]:
            exec(sys.argv[2])
sys.exit(pytest.main(["-q", "tests/unit/test_layers.py"], plugins=[Ends()]))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("end", "code"), [("os._exit(9)", 9), ("raise KeyboardInterrupt", 2), ("raise SystemExit(1)", 3)]
)
def test_tests_after_one_that_ends_its_launch_run_in_another(tmp_path, monkeypatch, end, code):
    """Also if pytest ends in order: interrupted, or with an internal error, as after the watchdog's exception."""
    monkeypatch.setattr(runner.speed, "measure", lambda: 1.0)
    tests = re.findall(r"^def (test_\w+)", (runner.ROOT / "tests/unit/test_layers.py").read_text(), re.MULTILINE)
    launch = Launch("unit", 1, [sys.executable, "-c", ENDS, tests[1], end], tmp_path / "records")
    first, second = runner.run_all([launch], runner.Config(stall=WAIT))
    assert (first.title, second.title) == ("unit", "unit, part 2")
    names = [[test.partition("::")[2] for test in each.passed] for each in (first, second)]
    assert names == [tests[:1], tests[2:]] and not second.failures
    ((problem, details),) = first.failures.items()
    assert problem == f"unit: ended by exit code {code}" and f"::{tests[1]}" in details[0]


@pytest.mark.full
def test_a_launch_of_many_tests_has_parts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner.speed, "measure", lambda: 1.0)
    tests = re.findall(r"^def (test_\w+)", (runner.ROOT / "tests/unit/test_layers.py").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "--at-most=5", "--tier=core", "tests/unit/test_layers.py"]
    launch = Launch("unit", 1, command, tmp_path / "records")
    parts = list(runner.run_all([launch], runner.Config(stall=WAIT)))
    assert [part.title for part in parts] == ["unit", *(f"unit, part {n}" for n in range(2, -(-len(tests) // 5) + 1))]
    assert len(parts) > 2 and [test.partition("::")[2] for part in parts for test in part.passed] == tests
    assert not any(part.failures for part in parts)
    recorded = tmp_path / "seconds.json"
    monkeypatch.setattr(runner, "RECORDED", recorded)
    runner.write_seconds(runner.Config(record=True), parts)
    assert json.loads(recorded.read_text()) == {"core": {"unit": round(sum(part.seconds for part in parts))}}
    is_over = iter([False, True])
    monkeypatch.setattr(runner, "is_over", lambda: next(is_over))
    (part,) = runner.run_all([Launch("unit", 1, command, tmp_path / "other")], runner.Config(stall=WAIT))
    assert len(part.passed) == 5 and f"unit, part 2: {len(tests) - 5} tests not begun" in capsys.readouterr().out


def launches(pid):
    """Return the launches of a test run."""
    return [child for child in psutil.Process(pid).children() if "pytest" in words(child.pid)]


@pytest.mark.full
def test_a_run_that_is_terminated_ends_its_launches(tmp_path):
    """SIGTERM reaches only the run, unlike Ctrl-C in a terminal. What has run until then is reported."""
    options = ["--unit-only", "-k", "test_a_launch_in_which_no_test_ends"]
    command = [sys.executable, "-c", "import sys, run; run.speed.measure = lambda: 1.0; sys.exit(run.main())", *options]
    with subprocess.Popen(command, cwd=runner.ROOT / "tests", stdout=subprocess.PIPE, text=True) as run:
        wait_until(lambda: launches(run.pid))
        (launch,) = launches(run.pid)
        run.terminate()
        output, _ = run.communicate(timeout=WAIT)
    assert run.returncode == 130
    assert not launch.is_running()
    assert output.splitlines()[-2:] == ["interrupted: other tests were not run", "0 passed, 0 failed"], output
