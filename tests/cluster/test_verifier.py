"""``HVDKIT_CHECK=1``: ranks that build unlike graphs are told the first collective that differs, and its lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs import MPI, run

from hvdkit.cluster.checks import PATIENCE, Checks

SCRIPT = Path(__file__).with_name("unlike.py")
LINES = {text.split("  # ")[1]: n for n, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "  # " in text}


def test_the_line_that_differs():
    code = f"import runpy, sys; sys.argv = ['', 'dtype']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    job = run(code, MPI, 2, HVDKIT_CHECK="1")
    assert job.code == 1
    mine = f"hvdkit.allreduce_float64 of float64[3] ({SCRIPT}:{LINES['another dtype']})"
    theirs = f"hvdkit.allreduce_float32 of float32[3] ({SCRIPT}:{LINES['the second']})"
    assert f"collective 2 of step is {mine}, but on rank 0 {theirs}" in job.output, job.output
    assert "hvdkit: rank 1 on" in job.output


def traced(*names, function="step", trace=1):
    return [{"function": function, "trace": trace, "what": name, "line": f"{name}.py:1"} for name in names]


def compare(*ranks):
    """The first difference, where ranks report in turns."""
    checks = Checks()
    longest = max(map(len, ranks))
    found = [
        checks.add(rank, told[place])
        for place in range(longest)
        for rank, told in enumerate(ranks)
        if place < len(told)
    ]
    return checks, next((difference for difference in found if difference), None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_like_graphs(ranks):
    checks, found = compare(*[traced("a", "b", "a")] * ranks)
    assert found is None and checks.overdue(1e12) is None


def test_a_function_traced_again_on_one_rank():
    checks, found = compare(traced("a", "b") + traced("a", "b", trace=2), traced("a", "b"))
    assert found is None and checks.overdue(1e12) is None


def test_another_order():
    _, found = compare(traced("a", "b", "c"), traced("a", "b", "c"), traced("a", "c", "b"))
    assert found.rank == 2 and "collective 2 of step is c (c.py:1), but on rank 0 b (b.py:1)" in found.cause


@pytest.mark.parametrize(
    ("ranks", "odd"), [((["a", "b"], ["a"]), 1), ((["a"], ["a", "b"]), 1), ((["a"] * 2, ["a"]), 1)]
)
def test_one_that_is_missing(ranks, odd):
    checks, found = compare(*[traced(*names) for names in ranks])
    last = max(trace.changed for traces in checks._traces.values() for trace in traces.values())
    assert found is None and checks.overdue(last + PATIENCE - 1) is None  # it may still come
    late = checks.overdue(last + PATIENCE + 1)
    assert late.rank == odd and "missing on rank" in late.cause
