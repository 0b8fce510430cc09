"""If one rank ends, the job ends soon: nonzero exit code, no process left, and a message that names the failed rank."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.jobs import selected
from helpers.jobs_that_fail import NoMemoryGroup, run
from helpers.speed import scaled, slowdown

HOST = socket.gethostname()
DIED = "died without reporting an error (killed, out of memory, or os._exit)"
# (fault, launcher, exit code or None for any but 0, seconds, text in the last line)
FAULTS = [
    ("caught", "mpirun", 1, 15, "failed at step 20: NotFoundError:"),
    ("raise", "hvdkit run, Gloo", 1, 5, "failed at step 20: ValueError: the disk is full; the job ended after"),
    ("thread", "mpirun", 1, 5, "failed at step 20: IndexError: list index out of range (in thread loader)"),
    ("sys.exit(3)", "mpirun", 3, 6, "failed at step 20: sys.exit(3) while other ranks continued"),
    ("sys.exit(0)", "horovodrun --gloo", 1, 5, "left the job at step 20: ended before the others: rank 0 still needed"),
    ("os._exit(0)", "hvdkit run", 1, 5, f"failed at step 20: {DIED}"),
    ("kill -9", "horovodrun", None, 5, f"failed at step 20: {DIED}"),
    ("SIGSTOP", "horovodrun --gloo", 1, 8, "failed at step 20: has been stopped (SIGSTOP) for"),
    ("hang", "mpirun", 1, 15, "hangs at step 20: no progress for"),
]
# These differ in the launcher, or in how the rank ends after its fault.
AT_NIGHT = [
    ("raise", "horovodrun --gloo", 1, 5, "failed at step 20: ValueError: the disk is full"),
    ("slow sys.exit(3)", "mpirun", 3, 12, "failed at step 20: sys.exit(3) while other ranks continued"),
    ("os._exit(0)", "horovodrun --gloo", 1, 5, f"failed at step 20: {DIED}"),
    ("kill -9", "mpirun", 137, 5, f"failed at step 20: {DIED}"),
    ("out of memory", "hvdkit run", 137, 5, "was killed by SIGKILL (out of memory?) at step 20; the job ended after"),
    ("killed in hk.busy", "horovodrun --gloo", 1, 8, f"failed at step 20: {DIED} (busy: uploading)"),
]


@pytest.fixture(scope="module")
def endings(request):
    """Run the jobs of all selected tests, two at a time since they mostly start or wait; yield their futures."""
    with ThreadPoolExecutor(2) as pool:
        yield {tuple(job.items()): pool.submit(run, **job) for (job,) in selected(request, "job")}


def job(fault, launcher, at=1, heartbeat=3, watchdog=6):
    """Return the arguments of one job."""
    settings = {"HVDKIT_HEARTBEAT_SECONDS": scaled(heartbeat), "HVDKIT_WATCHDOG_SECONDS": scaled(watchdog)}
    return {"fault": fault, "launcher": launcher, "at": at, **settings}


# Ranks that exit normally have 3 s to unwind (HVDKIT_UNWIND_SECONDS), then their interpreters have 4 s to end.
ORDERLY, ORDERLY_SECONDS = {"caught", "raise", "thread", "sys.exit(3)", "slow sys.exit(3)", "sys.exit(0)"}, 7


# An exception that the program catches is blamed after 5 s of waiting, on fast hosts as well.
PATIENCE = {"caught": 12}

JOBS = [pytest.param(job(*fault[:2], watchdog=PATIENCE.get(fault[0], 6)), *fault[2:]) for fault in FAULTS]
JOBS += [pytest.param(job(*fault[:2]), *fault[2:], marks=pytest.mark.nightly) for fault in AT_NIGHT]


@pytest.mark.parametrize(("job", "code", "seconds", "words"), JOBS)
def test_one_rank_fails(endings, job, code, seconds, words):
    try:
        ending = endings[tuple(job.items())].result()
    except NoMemoryGroup as why:
        pytest.skip(str(why))
    own = "hvdkit run: " if job["launcher"].startswith("hvdkit run") else "hvdkit: "
    assert ending.last.startswith(f"{own}rank 1 on {HOST} {words}"), ending.output
    assert ending.code == code if code is not None else ending.code, ending.output
    limit = seconds + (ORDERLY_SECONDS if job["fault"] in ORDERLY else 0)
    assert not ending.left and ending.seconds < limit * slowdown(), (ending.left, ending.seconds)
    lines = re.findall(r"^(?:\[[\d,]+\]<\w+>: ?)?hvdkit(?: run)?: ", ending.output, re.MULTILINE)
    assert len(lines) == 1 and "has trained" not in ending.output, ending.output
    assert ending.output.count("flight recorder: ") == 1, ending.output
    if job["fault"] == "hang":  # the stacks of all ranks, and the line at which the failed rank hangs
        stacks = re.findall(r"\[rank (\d)\] at step 20, .* its stacks", ending.output)
        assert sorted(stacks) == ["0", "1"] and "faulty.py" in ending.last


@pytest.mark.parametrize("job", [job("SIGSTOP", "mpirun", at=0)])
def test_the_chief_is_stopped(endings, job):
    """The chief's sentinel, which runs the coordinator, detects it and writes the last line."""
    ending = endings[tuple(job.items())].result()
    words = f"hvdkit: rank 0 on {HOST} failed at step 20: has been stopped (SIGSTOP) for "
    assert ending.last.startswith(words), ending.output
    assert ending.code and not ending.left and ending.seconds < 10 * slowdown()


@pytest.mark.parametrize("job", [job("busy", "mpirun", heartbeat=1.5)])
def test_no_false_alarm(endings, job):
    """A rank holds Python's lock for longer than heartbeats may be absent, and ends after the other ranks."""
    ending = endings[tuple(job.items())].result()
    assert ending.code == 0 and not ending.last, ending.output
    assert ending.output.count("has trained 40 steps") == 2 and ending.seconds > 3 + 3, ending.seconds


@pytest.mark.parametrize("job", [job("hk.busy", "hvdkit run", watchdog=2)])
def test_a_rank_that_says_that_it_is_busy_is_waited_for(endings, job):
    """Other ranks wait for it in a collective, longer than for a rank that is not busy or than Horovod would."""
    ending = endings[tuple(job.items())].result()
    assert ending.code == 0 and not ending.last, ending.output
    assert ending.output.count("has trained 40 steps") == 2, ending.output
