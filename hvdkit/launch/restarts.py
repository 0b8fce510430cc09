"""Starting again after a failure: when, on which hosts, with how many ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hvdkit.errors import NonFiniteError
from hvdkit.launch.hosts import Host, placed
from hvdkit.launch.output import Output
from hvdkit.launch.reach import Network, refuse
from hvdkit.launch.verdict import Verdict, shell_code

if TYPE_CHECKING:
    from hvdkit.launch.attempt import Signals
    from hvdkit.launch.command import Job

LONGEST_PAUSE_SECONDS = 60.0
# Before a restart a host may just have been lost: those that are left should not wait long for it.
CONNECT_SECONDS = 2.0
USAGE = 2
# EX_UNAVAILABLE of sysexits.h: too few hosts are left; elsewhere, or later, the job can go on.
TOO_FEW_HOSTS = 69


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
    left_out: set[str] = field(default_factory=set)
    _last: str | None = None

    def failed(self, name: str | None) -> None:
        """Note on which host the attempt failed first."""
        if name is not None and name == self._last:
            self.left_out.add(name)
        self._last = name

    def next(self, answering: set[str]) -> tuple[Host, ...] | None:
        """Return who takes part next, of the hosts that answer, or None where they are too few.

        A host on which the job failed twice in a row is left out from then on, if the others have slots enough.
        """
        there = [host for host in self.all if host.name in answering]
        good = [host for host in there if host.name not in self.left_out]
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
    """Say whether an attempt is not to be repeated.

    It is done, was stopped, its command line was wrong, or its values became NaN or infinite.
    """
    return verdict.code in (0, USAGE, NonFiniteError.exit_code) or verdict.stopped


def run(job: Job, program: Sequence[str], output: Output, signals: Signals) -> int:
    """Run attempts until one ends well, is stopped, or none is left; return the last one's exit code.

    That is :data:`TOO_FEW_HOSTS` where hosts were lost and had not come back for the last restart.

    Raises:
        ClusterError: before the first attempt a host is not as it must be.
    """
    config, taken = job.config, job.first_hosts()
    way, answers = job.network(taken)
    if (stopped := signals.wait(0)) is not None:  # Ctrl-C ends ssh, too, and no host is to blame
        return shell_code(-stopped)
    refuse(answers)
    least = config.min_np or sum(host.slots for host in taken)
    book = Hosts(job.hosts, config.np, least)
    restart = 0
    while True:
        ranks = job.ranks(taken)
        output.note(ranks, f"--- hvdkit run: attempt {restart + 1}, {ranks} ranks")
        verdict = job.attempt(taken, program, output, signals, way)
        if verdict.line:
            output.line(f"hvdkit run: {verdict.line}")
        if is_final(verdict):
            if verdict.code == NonFiniteError.exit_code and restart < config.max_restarts:
                output.line(
                    f"hvdkit run: not starting again: exit code {verdict.code} means that values became NaN or "
                    "infinite, and the same steps would give the same values"
                )
            return verdict.code
        book.failed(verdict.host)
        again, too_few = None, False
        while again is None:
            if restart == config.max_restarts:
                return TOO_FEW_HOSTS if too_few else verdict.code
            restart += 1
            wait = pause(config.backoff, restart)
            output.line(f"hvdkit run: starting again in {wait:g} s (restart {restart} of {config.max_restarts})")
            begin_at = time.monotonic() + wait
            if (stopped := signals.wait(wait - CONNECT_SECONDS)) is not None:
                return shell_code(-stopped)
            again = regroup(job, book, output) if job.hosts else (taken, way)
            too_few = again is None
            if (stopped := signals.wait(begin_at - time.monotonic())) is not None:
                return shell_code(-stopped)
        taken, way = again


def regroup(job: Job, book: Hosts, output: Output) -> tuple[tuple[Host, ...], Network] | None:
    """Return who takes part in the next attempt and how they are reached, or None where there are too few."""
    way, answers = job.network(job.hosts, min(CONNECT_SECONDS, job.config.check_timeout))
    silent = {answer.host for answer in answers if answer.problem}
    for answer in answers:
        if answer.problem:
            output.line(f"hvdkit run: without host {answer.host}: {answer.problem}")
    taken = book.next({host.name for host in job.hosts} - silent)
    if taken is None:
        output.line(f"hvdkit run: the hosts that are left have fewer than {book.least} slots (--min-np)")
        return None
    left_out = [host.name for host in job.hosts if host.name not in silent | {one.name for one in taken}]
    if left_out:
        output.line(f"hvdkit run: without {', '.join(left_out)}, where the job failed or which is not needed")
    output.line(f"hvdkit run: {job.ranks(taken)} ranks on {', '.join(map(str, taken))}")
    return taken, way
