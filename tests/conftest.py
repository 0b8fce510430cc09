"""Record every test's outcome as soon as it ends, so that the runner has it even if the process dies later."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.outcomes import BEGUN
from helpers.speed import WAIT
from helpers.tiers import EXAMPLES_VARIABLE, MARKS, NIGHTLY_EXAMPLES, TIERS, needs_more_ranks, selects
from helpers.time_limit import IS_OVER, is_over

from hvdkit.machine.launcher import launched_rank

LEFT = pytest.StashKey[int]()
"""Number of the tests of this launch that --at-most leaves to its next part."""
RECORDS = os.environ.get("HVDKIT_TEST_RECORDS")
# Make AutoGraph raise an error, instead of a warning, for a function that it cannot convert.
os.environ["AUTOGRAPH_STRICT_CONVERSION"] = "1"


class Recorder:
    """Append one JSON line when a test starts and one when it ends."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"rank-{rank}.jsonl").open("a")
        self._reports: list[pytest.TestReport] = []
        self._processes = 0
        sys.addaudithook(self._count)

    def _count(self, event: str, arguments: object) -> None:
        if event == "subprocess.Popen":
            self._processes += 1

    def _write(self, **line: object) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid or "collection", outcome="failed", detail=report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(collected=len(session.items), left=session.config.stash.get(LEFT, 0))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports = []
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome = outcome_of(self._reports)
        details = [report_text(r) for r in self._reports if r.failed or (r.skipped and outcome == "skipped")]
        seconds = round(sum(report.duration for report in self._reports), 2)
        self._write(test=nodeid, outcome=outcome, detail="\n".join(details), seconds=seconds)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(ended=int(exitstatus), processes=self._processes)


def outcome_of(reports: list[pytest.TestReport]) -> str:
    """Return a test's outcome from the reports of its setup, call and teardown."""
    if any(report.failed for report in reports):
        return "failed"
    return "skipped" if any(report.skipped for report in reports) else "passed"


def report_text(report: pytest.TestReport) -> str:
    """Return the failure and the captured output of a test."""
    if report.skipped:
        return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext
    sections = [f"--- {title} ---\n{text.rstrip()}" for title, text in report.sections if text.strip()]
    return "\n".join([report.longreprtext, *sections])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of a tier; without it, all that are named")
    parser.addoption(
        "--at-most", type=int, help="run only the first N tests; the runner starts another launch for others"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--tier") == "nightly":
        os.environ.setdefault(EXAMPLES_VARIABLE, str(NIGHTLY_EXAMPLES))
    for mark, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")
    if RECORDS:
        config.pluginmanager.register(Recorder(Path(RECORDS), launched_rank().rank), "hvdkit-recorder")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable the garbage collector during collection: Keras and some tests run it often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this part and tier at this number of ranks; without a tier, skip those that need more ranks."""
    tier, size = config.getoption("--tier"), launched_rank().size
    if BEGUN in os.environ:
        begun = set(Path(os.environ[BEGUN]).read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in begun]
    if tier is None:
        for item in items:
            if (reason := needs_more_ranks(size, item)) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
    else:
        kept = [item for item in items if selects(tier, size, item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    at_most = config.getoption("--at-most") or len(items)
    config.stash[LEFT] = len(items) - len(items[:at_most])
    del items[at_most:]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.stash.get(IS_OVER, is_over)():
        pytest.skip("no time was left: see --limit of tests/run.py")


def pytest_runtest_logfinish() -> None:
    """Collect the test's garbage, then take what is left out of later collections.

    ``keras.utils.clear_session`` collects; with the graphs of a thousand tests alive, that took half of the time.
    """
    if not is_over():  # else tests are only skipped
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def here():
    """Return the doctor's facts about the environment that runs the tests."""
    from hvdkit.commands.doctor import facts

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        return facts.gather(np=2, timeout=WAIT)
