"""The rank's side of the watchdog, with a real sentinel and without TensorFlow: failures that must not end a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.speed import WAIT

import hvdkit
from hvdkit.cluster import logs, tensorflow_loading
from hvdkit.watchdog.tracebacks import cause_of

PACKAGE = f"""
import sys, types
package = types.ModuleType("hvdkit")
package.__path__ = [{str(Path(hvdkit.__file__).parent)!r}]
sys.modules["hvdkit"] = package
"""
# Joins a job of two ranks, whose other rank never joins.
RANK = f"""{PACKAGE}
import logging, os, resource, signal, tempfile, time
from hvdkit.machine import processes
from hvdkit.machine.launcher import LaunchedRank
from hvdkit.watchdog.events import GiveStacks
from hvdkit.watchdog.reporter import reporter
from hvdkit.watchdog.uncaught import uncaught_errors
logging.basicConfig()
rank = reporter()
offer = rank.begin(LaunchedRank(launcher="x", rank=0, size=2, local_rank=0, local_size=2, controller="mpi"))
uncaught_errors().install(0, lambda: None, None)
rank.join(0, ["h", "h"], ["p", "p"], offer, [], lambda: None)
while not rank._sentinel:
    time.sleep(0.01)
"""
NO_FILES = """
class Said(logging.Handler):
    def emit(self, record):
        global said
        said = said or "no sentinel can be started" in record.getMessage()
said, held = False, []
logging.getLogger().addHandler(Said())  # after the one that writes
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    os.kill(rank._sentinel, signal.SIGKILL)
while not said:
    time.sleep(0.01)
print("the rank goes on", flush=True)
"""
NO_TEMPORARY_FILES = """
tempfile.tempdir = "/nowhere"
print(rank._thread.stacks(rank.recorder, None, "").text.count("its stacks"), flush=True)
"""
BUSY = """
busy = rank.busy("uploading")
busy.__enter__()
before, sent = rank._sentinel, []
send = rank.send
rank.send = lambda message: (sent.append(type(message).__name__), send(message))
os.kill(before, signal.SIGKILL)
while "Busy" not in sent:
    time.sleep(0.01)
print(sent[:3], flush=True)
"""
HELPER = """
sent = []
rank.send = sent.append
helper = rank.start_helper("helper", time.sleep, 0)
print(sent[0].waiters == [helper.native_id], flush=True)
"""
LEAVES = """
send = rank.send
def send_slowly(message):
    connected = rank._socket
    send(message)
    while type(message).__name__ == "Left" and connected.fileno() >= 0:  # until the sentinel has closed its end
        time.sleep(0.01)
rank.send = send_slowly
rank.leave_world(keeps_horovod=False)
print("left", flush=True)
"""
STOPPED = """
os.kill(rank._sentinel, signal.SIGSTOP)
while processes.stat(rank._sentinel).state != "T":
    time.sleep(0.01)
rank.leave(keeps_horovod=False)
while processes.stat(rank._sentinel).state == "T":
    time.sleep(0.01)
print("it goes on", flush=True)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RANK + script + "\nos._exit(0)"]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)


def test_a_sentinel_that_cannot_be_replaced_does_not_end_the_rank():
    done = run(NO_FILES)
    assert done.returncode == 0 and done.stdout == "the rank goes on\n", done
    assert "no sentinel can be started" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.full
def test_stacks_need_no_temporary_files():
    done = run(NO_TEMPORARY_FILES)
    assert done.stdout == "1\n", done


@pytest.mark.full
def test_a_new_sentinel_learns_that_the_rank_is_busy():
    done = run(BUSY)
    assert done.stdout.strip() == "['Connect', 'Training', 'Busy']", done


def test_the_work_of_a_helper_is_no_progress_of_the_rank():
    assert run(HELPER).stdout == "True\n"


@pytest.mark.full
def test_a_stopped_sentinel_hears_that_its_rank_leaves():
    assert run(STOPPED).stdout == "it goes on\n"


@pytest.mark.full
def test_a_sentinel_may_close_the_connection_before_its_rank():
    done = run(LEAVES)
    assert done.stdout == "left\n", done


def test_a_sentinel_loads_only_what_it_needs():
    """One runs for every rank, and these modules would add half its memory again."""
    unwanted = {"coordinator", "pathlib", "subprocess", "tempfile", "ctypes", "logging"}
    script = f"import hvdkit.watchdog.watching\nprint({unwanted} & {{name.split('.')[-1] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-IS", "-c", PACKAGE + script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


CAUSES = {
    "Graph execution error:\n\nDetected at node a\n  File x\n\nMPI failed.\n\t [[{{node a.1}}]] [Op:f]": "MPI failed.",
    "Graph execution error:\n\nDetected at node a\n<no stack>\nDataError: a.csv has changed\n"
    'Traceback (most recent call last):\n\n  File "x"\n    values = next(it)\n\n'
    "\t [[{{node PyFunc}}]]\n\t [[IteratorGetNext]] [Op:f]": "DataError: a.csv has changed",
    "the disk is full\nby 3 bytes": "the disk is full",
    "Graph execution error:": "Graph execution error:",
    "": "no message",
}


def test_the_cause_is_the_line_that_says_most():
    assert {message: cause_of(RuntimeError(message)) for message in CAUSES} == CAUSES


def test_loading_and_reporting_need_no_standard_error(monkeypatch):
    """Python sets sys.stderr to None if file descriptor 2 is closed when it starts."""
    monkeypatch.setattr(sys, "stderr", None)
    entered = []
    with tensorflow_loading._filtered_stderr():
        entered.append(logs.write_line("the thread that writes this has to end the job next"))
    assert entered == [None]  # neither raised
