"""``HVDKIT_CHECK=1``: ranks that build unlike graphs are told the first collective that differs, and its lines."""

from __future__ import annotations

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs import GLOO, MPI, run
from jobs_that_fail import PATHS

from hvdkit.cluster.checks import SETTLED, Waits

SCRIPT = Path(__file__).with_name("unlike.py")
LINES = {text.split("  # ")[1]: n for n, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "  # " in text}


def run_unlike(kind, ranks=2):
    code = f"import runpy, sys; sys.argv = ['', {kind!r}]; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    return run(code, MPI, ranks, HVDKIT_CHECK="1", PYTHONPATH=PATHS)


def at(comment, of="float32[3]"):
    return f"hvdkit.allreduce of {of} ({SCRIPT}:{LINES[comment]})"


NOTHING = {"nothing": (2, "")}
KINDS = {
    "dtype": (2, f"is in {at('another dtype', 'float64[3]')}, but rank 0 in {at('the second')}; build the same graph"),
    # Of three ranks the second one is another.
    "shape": (3, f"is in {at('the second', 'float32[2]')}, but rank 0 in {at('the second')}; build the same graph"),
    "extra": (2, f"is in {at('one more')}, but rank 0 in {at('the second')}; build the same graph"),
    "branch": (3, f"waits in {at('in a branch')}, but rank 0 in {at('after it')}, and neither can go on"),
    "eager": (2, f"waits in barrier() ({SCRIPT}:{LINES['alone']}), but rank 0 in {at('the first')}, and neither"),
}


@pytest.fixture(scope="module")
def jobs():
    """All of them, two at a time: most of the time they start, or wait."""
    with ThreadPoolExecutor(2) as pool:
        yield {kind: pool.submit(run_unlike, kind, ranks) for kind, (ranks, _) in (KINDS | NOTHING).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_lines_that_differ(jobs, kind):
    job = jobs[kind].result()
    assert job.code == 1
    words = r"hvdkit: rank 1 on \S+ failed: CollectiveMismatchError: " + re.escape(KINDS[kind][1])
    assert re.search(words, job.output), job.output


def test_ranks_that_do_alike_are_left_alone(jobs):
    job = jobs["nothing"].result()
    assert job.code == 0 and job.output.count("trained") == 2 and "hvdkit:" not in job.output, job.output


def wait_in(*pending, seconds=SETTLED + 1):
    """What keeps ranks apart that wait in "a", in "a01" where only ranks 0 and 1 take part, or in "a=x" as an x."""
    waits = Waits()
    for rank, words in enumerate(pending):
        for key, _, what in (word.partition("=") for word in words.split()):
            name = key[0] if key[0].isalpha() else what
            place = {"what": what or name, "line": f"{name}.py:1", "alike": True}
            waits.begin(rank, {"key": key, "ranks": [int(number) for number in key[1:]] or None, **place})
            waits.begin(rank, {"key": "done", "what": "done", "line": "done.py:1", "alike": True})
            waits.end(rank, {"key": "done"})
    return waits.difference(set(range(len(pending))), time.monotonic() + seconds)


def wait_eagerly(*places):
    """Ranks that wait in eager collectives, each among some ranks, and have been asked whether they still do."""
    waits = Waits()
    for rank, ranks in enumerate(places):
        if ranks is not None:
            waits.begin(
                rank, {"key": f"eager 1 of {ranks}", "what": f"sum of {ranks}", "line": "a.py:1", "ranks": ranks}
            )
    now = time.monotonic() + SETTLED
    assert waits.difference(set(range(len(places))), now) is None, "no rank has answered"
    return waits, now


@pytest.mark.parametrize(
    ("places", "stuck"),
    [
        (([0, 1], [1, 2], [0, 2]), [0, 1, 2]),
        (([0, 1, 2, 3], [0, 1], [0, 1, 2, 3], [2, 3]), [0, 1, 2, 3]),
        (([0, 1], [1, 2, 0], None, [2, 3]), [0, 1]),  # rank 2 computes, rank 3 waits for it
        (([0, 1], [0, 1], [2, 3], [2, 3]), []),  # all under way
        (([0, 1], None, [0, 1, 2]), []),  # rank 1 will come
        (([0, 1], [0, 1], [0, 1, 2]), []),  # 0 and 1 will come
    ],
)
def test_ranks_that_wait_for_each_other_are_asked_first(places, stuck):
    waits, now = wait_eagerly(*places)
    assert sorted(waits.to_ask) == stuck
    everyone = set(range(len(places)))
    for rank in stuck[1:]:
        waits.still(rank, f"eager 1 of {places[rank]}")
    assert waits.difference(everyone, now + SETTLED) is None
    if stuck:
        waits.still(stuck[0], None)  # it has gone on
        assert waits.difference(everyone, now + 2 * SETTLED) is None
        waits.still(stuck[0], f"eager 1 of {places[stuck[0]]}")
        found = waits.difference(everyone, now + 3 * SETTLED)
        assert found.rank in stuck and "and neither can go on" in found.cause


UNLIKE_SETS = """
import numpy as np, hvdkit as hk
hk.init()
sets = [hk.ProcessSet(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
x = np.ones(3, np.float32)
for one in sets:
    if one.included():
        hk.allreduce(x, process_set=one)
print('together', flush=True)
hk.allreduce(x, process_set=sets[hk.rank()])
"""


@pytest.mark.parametrize(("launcher", "extra"), [(MPI, {}), (GLOO, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})])
def test_ranks_in_unlike_process_sets_end_with_an_error(launcher, extra):
    """Without ``HVDKIT_CHECK``. Each waits for the next one, in a circle."""
    job = run(UNLIKE_SETS, launcher, 3, **extra)
    assert job.code != 0 and job.output.count("together") == 3, job.output
    words = (
        r"rank 1 on .* waits in allreduce\(.*process_set=\[1, 2\].*, but rank 0 in allreduce\(.*process_set=\[0, 1\]"
    )
    assert re.search(words, job.output), job.output


LATE = """
import time
import numpy as np, hvdkit as hk
hk.init()
x = np.ones(20_000, np.float32)
{before}
time.sleep(15 if hk.rank() == 2 else 0)
hk.allreduce(x)
print('averaged', flush=True)
"""
JOIN_ONE_BY_ONE = """
for _ in range(hk.rank() + 1):
    hk.allreduce(x)
hk.join()
"""
WAIT_FOR_THOSE_BEFORE = """
for _ in range(10):
    handles = [hk.allreduce_async(x) for _ in range(2)]
    time.sleep(0.01 * hk.rank())
    hk.allgather_object(1)
"""


@pytest.mark.parametrize("before", [JOIN_ONE_BY_ONE, WAIT_FOR_THOSE_BEFORE], ids=["join", "asynchronous"])
def test_two_ranks_may_wait_for_a_late_one(before):
    """Rank 0 must not take one collective for two, whatever each rank has exchanged before."""
    job = run(LATE.format(before=before), MPI, 3)
    assert job.code == 0 and job.output.count("averaged") == 3, job.output


def test_ranks_that_go_on_by_themselves():
    assert wait_in("a", "a", "a") is None  # under way
    assert wait_in("a", "") is None  # one that computes will come
    assert wait_in("a b", "b c") is None
    assert wait_in("a", "b", seconds=0) is None  # messages are on their way
    assert wait_in("a01", "a01", "b") is None


def test_one_function_after_another_with_lines_in_common():
    """Ranks train with the lines a and b, and evaluate with b alone, by a function of the same name, out of step."""
    waits = Waits()
    for rank, key, line in ((0, "1", "a"), (1, "1", "a"), (0, "2", "b"), (1, "2", "b"), (0, "1", "b"), (1, "1", "b")):
        waits.begin(rank, {"key": key, "what": "x", "line": line, "alike": True})
        assert waits.difference({0, 1}, time.monotonic()) is None
        waits.end(rank, {"key": key})


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 2, 1, 3, 4), (3, 4, 0, 2, 1)])
def test_one_more_is_found_whatever_comes_first(order):
    begun = [(1, "1", "a"), (1, "2", "more"), (1, "3", "b"), (0, "1", "a"), (0, "2", "b")]
    waits = Waits()
    for rank, key, line in (begun[place] for place in order):
        waits.begin(rank, {"key": key, "what": "x", "line": line, "alike": True})
        waits.end(rank, {"key": key})
    found = waits.difference({0, 1}, time.monotonic())
    assert found.rank == 1 and "is in x (more), but rank 0 in x (b)" in found.cause


@pytest.mark.parametrize(
    ("pending", "odd", "words"),
    [
        (("a", "a", "b"), 2, "waits in b (b.py:1), but rank 0 in a (a.py:1)"),
        (("b", "a", "a"), 0, "waits in b (b.py:1), but rank 1 in a (a.py:1)"),
        (("a01", "b", "b"), 0, "waits in a (a.py:1), but rank 1 in b (b.py:1)"),
        (("a=x", "a=x", "a=y"), 2, "is in y (a.py:1), but rank 0 in x (a.py:1)"),
        # The same dtypes and shapes, in another order: "b" on rank 1 has the name of "c" on rank 0.
        (("1=b 2=c", "1=c 2=b"), 1, "is in c (c.py:1), but rank 0 in b (b.py:1)"),
        (("1=b 2=c", "1=x 2=b 3=c", "1=b 2=c"), 1, "is in x (x.py:1), but rank 0 in b (b.py:1)"),
        (("a=y", "a=x", "a=x"), 0, "is in y (a.py:1), but rank 1 in x (a.py:1)"),
    ],
)
def test_ranks_that_cannot_go_on(pending, odd, words):
    found = wait_in(*pending)
    assert found.rank == odd and words in found.cause
