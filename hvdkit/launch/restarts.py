"""Starting again after a failure: when, on which hosts, with how many ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdkit.launch.hosts import Host, placed
from hvdkit.launch.output import Output
from hvdkit.launch.verdict import Verdict, shell_code

LONGEST_PAUSE_SECONDS = 60.0
# A host on which the job failed so many times in a row is left out.
FAILURES_TO_LEAVE = 2
USAGE = 2


@dataclass
class Hosts:
    """The hosts of a job over its attempts. Pure: told what failed and who answers, it says who takes part.

    Example:
        >>> hosts = Hosts((Host("a", 2), Host("b", 2)), np=4, least=2)
        >>> hosts.failed("b"); hosts.failed("b")
        >>> hosts.next({"a", "b"})
        (Host(name='a', slots=2),)
    """

    all: tuple[Host, ...]
    np: int | None
    least: int
    in_a_row: Counter[str] = field(default_factory=Counter)

    def failed(self, name: str | None) -> None:
        """Note on which host the attempt failed first; on every other it did not."""
        count = self.in_a_row[name] if name else 0
        self.in_a_row.clear()
        if name:
            self.in_a_row[name] = count + 1

    def next(self, answering: set[str]) -> tuple[Host, ...] | None:
        """Return who takes part next, of the hosts that answer, or None where they are too few.

        A host that failed twice in a row comes last: it is left out if the others have slots enough for the least.
        """
        there = [host for host in self.all if host.name in answering]
        good = [host for host in there if self.in_a_row[host.name] < FAILURES_TO_LEAVE]
        for hosts in (good, there):
            slots = sum(host.slots for host in hosts)
            if slots >= self.least:
                return placed(hosts, min(slots, self.np or slots))
        return None


def pause(base: float, restart: int) -> float:
    """Return the seconds to wait before a restart, the first being 1.

    Example:
        >>> [pause(1.0, restart) for restart in (1, 2, 3, 10)]
        [1.0, 2.0, 4.0, 60.0]
    """
    return min(LONGEST_PAUSE_SECONDS, base * 2 ** (restart - 1))


def is_final(verdict: Verdict) -> bool:
    """Say whether an attempt is not to be repeated: it is done, was stopped, or its command line was wrong."""
    return verdict.code in (0, USAGE) or verdict.stopped


def run(job, program: Sequence[str], output: Output, signals) -> int:
    """Run attempts until one ends well, is stopped, or none is left; return the last one's exit code."""
    config = job.config
    hosts = job.first_hosts()
    for restart in range(config.max_restarts + 1):
        output.note(job.ranks(hosts), f"--- hvdkit run: attempt {restart + 1}, {job.ranks(hosts)} ranks")
        verdict = job.attempt(hosts, program, output, signals)
        if verdict.line:
            output.line(f"hvdkit run: {verdict.line}")
        if is_final(verdict) or restart == config.max_restarts:
            return verdict.code
        wait = pause(config.backoff, restart + 1)
        output.line(f"hvdkit run: starting again in {wait:g} s (restart {restart + 1} of {config.max_restarts})")
        if (stopped := signals.wait(wait)) is not None:
            return shell_code(-stopped)
    return verdict.code
