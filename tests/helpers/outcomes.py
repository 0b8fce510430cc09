"""Merge the records of all ranks of a launch into one outcome per test."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TAIL_LINES = 40
BEGUN = "HVDKIT_TEST_BEGUN"
"""Variable of the environment: a file with the tests, one in a line, that earlier launches have begun."""
VERDICT = "verdict.txt"
"""File in the run's folder with what hvdkit's watchdog wrote; pytest would capture it.

It is the reason for which the watchdog ended the ranks, or a report of ranks that wait for another one for half a
minute, as they may on a slow machine.
"""
_CUT_SHORT = {None, 2, 3}
"""Exit codes of a rank that has not run all tests: it has died, or pytest was interrupted or had an internal error."""
_NOISE = re.compile(r"/_pytest/|/pluggy/|/pytest/__main__|<frozen runpy>|^Extension modules:|^\s*$")


@dataclass
class Launch:
    """One command that runs tests on ``size`` ranks, and its results.

    ``failures`` maps a test's id, or the name of a problem outside the tests, to the details of each rank.
    ``test_seconds`` has the seconds of the slowest rank, and ``processes`` counts the ranks and the processes that
    tests started, without those that these started in turn. ``watchdog`` is what the watchdog wrote. ``begun`` is a
    file with the tests of its earlier parts, which are not run again. ``left`` counts the tests for its next part,
    and ``not_run`` those that it has not begun. ``interrupted`` says that the user ended the run.
    """

    name: str
    size: int
    command: list[str]
    folder: Path
    seconds: float = 0.0
    exit_code: int | None = None
    stalled: float | None = None
    interrupted: bool = False
    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: dict[str, dict[int, str]] = field(default_factory=dict)
    not_run: int = 0
    left: int = 0
    test_seconds: dict[str, float] = field(default_factory=dict)
    processes: int = 0
    watchdog: str = ""
    begun: Path | None = None
    part: int = 1

    @property
    def title(self) -> str:
        """The name, with the number of the part from the second one on."""
        return self.name if self.part == 1 else f"{self.name}, part {self.part}"

    def read(self) -> None:
        """Read the ranks' records into ``passed``, ``skipped`` and ``failures``."""
        ranks = [_records(self.folder / f"rank-{rank}.jsonl") for rank in range(self.size)]
        ended: dict[str, dict[int, dict[str, Any]]] = {}
        for rank, lines in enumerate(ranks):
            for line in lines:
                if "test" in line:
                    ended.setdefault(line["test"], {})[rank] = line
        self.not_run = 0
        self.left = max((line["left"] for lines in ranks for line in lines if "left" in line), default=0)
        self.processes = self.size + sum(line.get("processes", 0) for lines in ranks for line in lines)
        for test, by_rank in ended.items():
            self.test_seconds[test] = max(line.get("seconds", 0.0) for line in by_rank.values())
            failed = {rank: line["detail"] for rank, line in by_rank.items() if line["outcome"] == "failed"}
            if failed:
                self.failures[test] = failed
            elif len(by_rank) == self.size:
                if all(line["outcome"] == "skipped" for line in by_rank.values()):
                    self.skipped[test] = by_rank[0]["detail"]
                else:
                    self.passed.append(test)
        whole = [rank for rank, lines in enumerate(ranks) if {line.get("ended") for line in lines} - _CUT_SHORT]
        self.watchdog = _tail(self.folder / VERDICT)
        if len(whole) < self.size or self.stalled is not None:
            self._read_end(ranks, whole)
        elif self.exit_code not in (0, 1, 2, 5) or (self.exit_code in (1, 2) and not self.failures):
            self.failures["the launcher"] = {0: f"exit code {self.exit_code}\n{_tail(self.folder / 'launcher.out')}"}
        else:
            return
        if self.watchdog and not self.interrupted:
            self.failures["the watchdog"] = {0: self.watchdog}

    def _read_end(self, ranks: list[list[dict[str, Any]]], whole: list[int]) -> None:
        """Record the ranks that did not exit normally, and the test that each was running."""
        details = {}
        for rank, lines in enumerate(ranks):
            if rank in whole:
                continue
            tests = [line["started"] for line in lines if "started" in line]
            done = {line["test"] for line in lines if "test" in line}
            inside = tests[-1] if tests and tests[-1] not in done else (f"after {tests[-1]}" if tests else "at start")
            output = _tail(self.folder / f"rank-{rank}.out") or _tail(self.folder / "launcher.out")
            stacks = _tail(self.folder / f"stacks-{rank}.txt")
            details[rank] = "\n".join([f"in: {inside}", output, stacks])
        collected = max((line["collected"] for lines in ranks for line in lines if "collected" in line), default=0)
        self.not_run = max(0, collected - len(self.passed) - len(self.skipped) - len(self.failures))
        if self.interrupted:
            return
        hung = self.stalled is not None
        why = f"hung: no test ended for {self.stalled:g} s" if hung else f"ended by {_ending(self.exit_code)}"
        self.failures[f"{self.title}: {why}"] = details

    def next_part(self) -> Launch | None:
        """Return a launch of the tests that this one did not begin; None if it began all or none."""
        lines = [line for rank in range(self.size) for line in _records(self.folder / f"rank-{rank}.jsonl")]
        begun = dict.fromkeys(line["started"] for line in lines if "started" in line)
        if not (self.not_run or self.left) or not begun:
            return None
        before = self.begun.read_text() if self.begun is not None else ""
        file = self.folder / "begun.txt"
        file.write_text(before + "".join(f"{test}\n" for test in begun))
        part = self.part + 1
        folder = self.folder.with_name(f"{self.folder.name.partition('-part-')[0]}-part-{part}")
        tests = self.not_run + self.left
        return Launch(self.name, self.size, self.command, folder, not_run=tests, begun=file, part=part)

    def summary(self) -> str:
        """Return one line with the number of tests and the time."""
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        not_run = f", {self.not_run} not run" if self.not_run else ""
        return f"{len(self.passed)} passed, {len(self.failures)} failed{skipped}{not_run} in {self.seconds:.1f} s"

    def record(self) -> dict[str, Any]:
        """Return the seconds and counts of this launch, for a JSON file."""
        return {
            "seconds": round(self.seconds, 1),
            "cases": len(self.passed) + len(self.failures),
            "processes": self.processes,
            "tests": self.test_seconds,
        }


def slowest(launches: list[Launch], count: int) -> str:
    """Return lines with the slowest tests, and the seconds, cases and process starts of each launch."""
    tests = [(seconds, test, launch.title) for launch in launches for test, seconds in launch.test_seconds.items()]
    lines = [f"{'seconds':>9}  slowest tests"]
    lines += [f"{seconds:9.2f}  {test} [{name}]" for seconds, test, name in sorted(tests, reverse=True)[:count]]
    lines.append(f"{'seconds':>9} {'cases':>6} {'starts':>6}  launches")
    for launch in sorted(launches, key=lambda each: -each.seconds):
        cases = len(launch.passed) + len(launch.failures)
        lines.append(f"{launch.seconds:9.1f} {cases:6} {launch.processes:6}  {launch.title}")
    lines.append(f"{sum(launch.processes for launch in launches)} processes started by launchers and tests")
    return "\n".join(lines)


def report(launch: Launch) -> str:
    """Return every failure once: the first failing rank's in full, those of other ranks only if they differ."""
    blocks = []
    for test, details in launch.failures.items():
        ranks = f" on rank {', '.join(map(str, details))} of {launch.size}" if launch.size > 1 else ""
        lines = [f"\n===== FAILED {test} [{launch.title}]{ranks} ====="]
        seen: dict[str, int] = {}
        for rank, detail in details.items():
            cause = _cause(detail)
            if cause in seen:
                lines.append(f"[rank {rank}] as rank {seen[cause]}")
                continue
            shown = detail if not seen else _errors(detail) or detail
            seen[cause] = rank
            lines += [f"[rank {rank}] {line}" if launch.size > 1 else line for line in shown.splitlines()]
        blocks.append("\n".join(lines))
    for reason in dict.fromkeys(launch.skipped.values()):
        tests = [test for test, why in launch.skipped.items() if why == reason]
        blocks.append(f"  skipped {len(tests)}: {reason.removeprefix('Skipped: ')}")
    if launch.watchdog and "the watchdog" not in launch.failures:
        blocks.append(f"  the watchdog wrote:\n{launch.watchdog}")
    return "\n".join(blocks)


def reason(details: dict[int, str]) -> str:
    """Return one line: the error of the first rank that failed, and the ranks that failed."""
    rank, detail = next(iter(details.items()), (0, ""))
    lines = [line.removeprefix("E ").strip() for line in (_errors(detail) or detail).splitlines()]
    others = f" (and rank {', '.join(map(str, list(details)[1:]))})" if len(details) > 1 else ""
    return f"rank {rank}{others}: {next((line for line in lines if line), 'no output')}"


def _errors(detail: str) -> str:
    """Return the lines with the error, without those with its location."""
    return "\n".join(line for line in detail.splitlines() if line.startswith("E "))


def _cause(detail: str) -> str:
    """Return the error without numbers: ranks, times and addresses differ even if the cause is the same."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", _errors(detail) or detail)


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # A killed rank may have written only part of its last line.
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _tail(path: Path) -> str:
    """Return the last lines of a file, without the frames of pytest itself."""
    if not path.exists():
        return ""
    lines = [line for line in path.read_text(errors="replace").splitlines() if not _NOISE.search(line)]
    return "\n".join(lines[-_TAIL_LINES:])


def _ending(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
