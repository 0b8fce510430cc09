"""Keep ranks in step: no rank starts a test before all have finished the previous one, and none waits forever.

All ranks run these files at once, e.g. ``mpirun -np 3 python -m pytest tests/parallel``. A test that fails on
some ranks only is a plain failure as long as all ranks finish it. If one rank failed and another still waits for
it in a collective, they cannot be synchronized again: the failed rank ends the launch, and each rank's stack goes
to ``stacks-<rank>.txt`` in the folder of the run.

The ranks synchronize through files, one byte per finished test, and not through the collectives under test.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.outcomes import VERDICT
from helpers.pairwise import each, pairs
from helpers.speed import STALL, slowdown
from helpers.time_limit import IS_OVER, is_over

import hvdkit as hk
from hvdkit.cluster.progress import progress
from hvdkit.optimizer import coupled_layers
from hvdkit.watchdog.reporter import Reporter

# Seconds for the peers of a failed rank to finish the same test, multiplied by the machine's slowdown.
GRACE_SECONDS = 60
# Maximum seconds of a rank in one test, waiting for peers included. The runner ends a stalled launch earlier.
TEST_SECONDS = STALL + 60

RECORDS = os.environ.get("HVDKIT_TEST_RECORDS")


def _show_verdict(file: str) -> None:
    """Let sentinels write to ``file``: they start while pytest captures this rank's output, which it then discards."""
    start = Reporter._start_sentinel

    def start_with_file(*arguments: Any) -> None:
        before, written = os.dup(2), os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(written, 2)
        try:
            start(*arguments)
        finally:
            os.dup2(before, 2)
            os.close(before)
            os.close(written)

    Reporter._start_sentinel = start_with_file  # type: ignore[method-assign]


if RECORDS:
    _show_verdict(f"{RECORDS}/{VERDICT}")
CLUSTER = hk.init()


OVER = b"!"
"""The byte for a test after which the time was over."""


class Steps:
    """One file per rank with a byte for each test that the rank has finished; rank 0 decides when time is over."""

    def __init__(self) -> None:
        folder = RECORDS or hk.broadcast_object(tempfile.mkdtemp(prefix="hvdkit-tests-"))
        self.folder = Path(folder)
        self._files = [self.folder / f"ended-{rank}" for rank in range(CLUSTER.size)]
        self._mine = self._files[CLUSTER.rank].open("ab", buffering=0)
        self._ended = 0
        self.stacks = (self.folder / f"stacks-{CLUSTER.rank}.txt").open("a")

    def end_test(self) -> None:
        """Report that this rank has finished its test, and wait until every rank has."""
        self._mine.write(OVER if is_over() else b".")
        self._ended += 1
        nap = 0.0005
        while any(not f.exists() or f.stat().st_size < self._ended for f in self._files):
            time.sleep(nap)
            nap = min(2 * nap, 0.01)

    def is_over(self) -> bool:
        """Return True if rank 0 said with its last test that the time is over."""
        return self._ended > 0 and self._files[0].read_bytes()[self._ended - 1 : self._ended] == OVER


def pytest_configure(config: pytest.Config) -> None:
    steps = Steps()
    config.stash[STEPS] = steps
    config.stash[IS_OVER] = steps.is_over
    config.option.basetemp = str(steps.folder / f"tmp-{CLUSTER.rank}")
    faulthandler.register(signal.SIGTERM, steps.stacks, all_threads=True, chain=True)


STEPS = pytest.StashKey[Steps]()
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    steps = item.config.stash[STEPS]
    _limit(TEST_SECONDS, steps, item.nodeid)
    try:
        result = yield
        if item.stash.get(FAILED, False):
            grace = min(GRACE_SECONDS * slowdown(), TEST_SECONDS)
            _limit(grace, steps, f"{item.nodeid}, which has failed on this rank")
        steps.end_test()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return result


def _limit(seconds: float, steps: Steps, where: str) -> None:
    """End this process with its stacks after ``seconds``; the launcher then ends the other ranks."""
    steps.stacks.seek(0)
    steps.stacks.truncate()
    steps.stacks.write(f"may spend {seconds:.0f} s in {where}\n")
    steps.stacks.flush()
    faulthandler.dump_traceback_later(seconds, exit=True, file=steps.stacks)


@pytest.fixture(autouse=True, scope="module")
def same_numbers() -> Iterator[None]:
    """Check that all ranks number their exchanges equally: rank 0 identifies a collective by its number."""
    yield
    hk.allgather_object(None)  # the previous one may have been among some ranks only
    keys = hk.allgather_object(progress().key)
    assert len(set(keys)) == 1, keys


@pytest.fixture(autouse=True, scope="module")
def no_layers_of_other_files() -> Iterator[None]:
    """Forget synchronized layers of other files, which may be kept alive: gradients next to them have no weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coupled_layers, "_coupled", weakref.WeakSet())
        yield


@pytest.fixture
def rank() -> int:
    return CLUSTER.rank


@pytest.fixture
def size() -> int:
    return CLUSTER.size


@pytest.fixture
def rng() -> np.random.Generator:
    """Return the same random generator on every rank."""
    return np.random.default_rng(20)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Return what hvdkit logs during the test."""
    monkeypatch.setattr(logging.getLogger("hvdkit"), "propagate", True)
    caplog.set_level("INFO", "hvdkit")
    return caplog


@pytest.fixture
def crossed(request: pytest.FixtureRequest, size: int) -> Callable[..., list[tuple[Any, ...]]]:
    """Return a function of axes that returns cases: with every pair of two values on 2 ranks, else with every value.

    What depends on two values at once, e.g. on a dtype and a graph, does not also depend on the number of ranks. The
    nightly tier has every pair everywhere.
    """
    return pairs if size == 2 or request.config.getoption("--tier") == "nightly" else each


@pytest.fixture
def shared_path(request: pytest.FixtureRequest) -> Path:
    """Return a folder of this test, the same on every rank."""
    folder = hk.broadcast_object(tempfile.mkdtemp(dir=request.config.stash[STEPS].folder) if hk.is_chief() else None)
    return Path(folder)


@pytest.fixture
def removed(shared_path: Path) -> Iterator[None]:
    """Remove the test's folder once every rank has finished."""
    yield
    hk.barrier()
    if hk.is_chief():
        shutil.rmtree(shared_path, ignore_errors=True)
