"""Restarts after a failure: their timing, hosts and number of ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hvdkit.commands.run.attempt import Attempt, Signals
from hvdkit.commands.run.hosts import Host, place_ranks, slots_of
from hvdkit.commands.run.job import Job
from hvdkit.commands.run.output import OutputWriter
from hvdkit.commands.run.preflight import Network, raise_problems
from hvdkit.errors import NonFiniteError
from hvdkit.watchdog.verdict import Verdict, shell_code

LONGEST_PAUSE_SECONDS = 60.0
# Seconds for ssh to connect before a restart: a host may just have been lost, and the others should not wait for long.
CONNECT_SECONDS = 2.0
# Seconds for a paused reader to take the last lines after a stop signal. Not limited without a signal.
_READ_SECONDS = 5.0
USAGE = 2
# EX_UNAVAILABLE of sysexits.h: too few hosts are left. The job can continue later, or on other hosts.
TOO_FEW_HOSTS = 69


@dataclass
class HostPool:
    """Chooses the hosts of each attempt of a job. Pure: depends only on failures, and on which hosts answer.

    Example:
        >>> pool = HostPool((Host("a", 2), Host("b", 2)), np=4, min_slots=2)
        >>> pool.failed("b"); pool.failed("b")
        >>> pool.next({"a", "b"})
        (Host(name='a', slots=2),)
    """

    all: tuple[Host, ...]
    np: int | None
    min_slots: int
    left_out: set[str] = field(default_factory=set)
    _last: str | None = None

    def failed(self, name: str) -> None:
        """Record the host on which the attempt failed first, "" if unknown."""
        if name == self._last:
            self.left_out.add(name)
        self._last = name

    def next(self, answering: set[str]) -> tuple[Host, ...] | None:
        """Choose the hosts of the next attempt from those that answer; None if they have too few slots.

        A host on which the job failed twice in a row is excluded from then on, if the others have enough slots.
        """
        present = [host for host in self.all if host.name in answering]
        good = [host for host in present if host.name not in self.left_out]
        for hosts in (good, present):
            slots = slots_of(hosts)
            if slots >= self.min_slots:
                return place_ranks(hosts, min(slots, self.np or slots))
        return None


def is_final(verdict: Verdict) -> bool:
    """Return True if the job must not be restarted.

    This is the case if it succeeded or was stopped, its command line was invalid, or values became NaN or infinite.
    """
    return verdict.code in (0, USAGE, NonFiniteError.exit_code) or verdict.final


def run(job: Job, program: Sequence[str], output: OutputWriter) -> Verdict:
    """Run attempts until one succeeds or is stopped, or all restarts are used.

    Returns:
        The verdict on the last attempt, with exit code :data:`TOO_FEW_HOSTS` if too few hosts were left for the last
        restart.

    Raises:
        ClusterError: before the first attempt, a host fails the check.
    """
    with Signals() as signals:
        try:
            return _attempts(job, program, output, signals)
        finally:
            output.end()
            output.finish(0.1)
            output.report_loss()
            until = time.monotonic() + _READ_SECONDS
            while not output.finish(0.1):
                signals.read()
                if signals.stopped and time.monotonic() > until:
                    break


def _attempts(job: Job, program: Sequence[str], output: OutputWriter, signals: Signals) -> Verdict:
    config = job.config
    hosts = place_ranks(job.hosts, config.np)
    network, answers = job.network(hosts)
    if (stopped := signals.wait(0)) is not None:  # Ctrl-C also ends ssh, which is not the hosts' fault
        return _stopped(stopped)
    raise_problems(answers)
    output.line(f"hvdkit run: {job.start_line(hosts)}")
    pool = HostPool(job.hosts, config.np, min_slots=config.min_np or slots_of(hosts))
    restart = 0
    while True:
        ranks = slots_of(hosts)
        output.begin(ranks)
        output.note(ranks, f"--- hvdkit run: attempt {restart + 1}, {ranks} ranks")
        verdict = Attempt(job, hosts, network, program, output, signals).run()
        if verdict.line:
            output.line("\n".join(filter(None, [f"hvdkit run: {verdict.last_line}", verdict.flight])))
        code = verdict.code
        if is_final(verdict):
            if code == NonFiniteError.exit_code and restart < config.max_restarts:
                output.line(
                    f"hvdkit run: not restarting: exit code {code} means that values became NaN or infinite, "
                    "and the same steps would give the same values"
                )
            return verdict
        pool.failed(verdict.host)
        chosen = None
        while chosen is None:
            if restart == config.max_restarts:
                return verdict
            restart += 1
            wait = min(LONGEST_PAUSE_SECONDS, config.backoff * 2 ** (restart - 1))
            output.line(f"hvdkit run: restarting in {wait:g} s (restart {restart} of {config.max_restarts})")
            begin_at = time.monotonic() + wait
            if (stopped := signals.wait(wait - CONNECT_SECONDS)) is not None:
                return _stopped(stopped)
            chosen = next_hosts(job, pool, output)
            verdict = replace(verdict, code=TOO_FEW_HOSTS)  # if this is the last restart, with too few hosts left
            if (stopped := signals.wait(begin_at - time.monotonic())) is not None:
                return _stopped(stopped)
        hosts, network = chosen


def _stopped(number: signal.Signals) -> Verdict:
    """Return the verdict on a job that was stopped by a signal before or between two attempts."""
    return Verdict(shell_code(-number), f"{number.name}: the job was stopped before its ranks started", final=True)


def next_hosts(job: Job, pool: HostPool, output: OutputWriter) -> tuple[tuple[Host, ...], Network] | None:
    """Return the hosts of the next attempt and the network between them, or None if too few are left."""
    network, answers = job.network(job.hosts, min(CONNECT_SECONDS, job.config.check_timeout))
    for answer in answers:
        if answer.problem:
            output.line(f"hvdkit run: excluding host {answer.host}: {answer.problem}")
    answering = {host.name for host in job.hosts} - {answer.host for answer in answers if answer.problem}
    hosts = pool.next(answering)
    if hosts is None:
        output.line(f"hvdkit run: the remaining hosts have fewer than {pool.min_slots} slots (--min-np)")
        return None
    if left_out := answering - {host.name for host in hosts}:
        names = ", ".join(host.name for host in job.hosts if host.name in left_out)
        output.line(f"hvdkit run: not using {names}: the job failed there, or it is not needed")
    if len(job.hosts) > 1:
        output.line(f"hvdkit run: {slots_of(hosts)} ranks on {', '.join(map(str, hosts))}")
    return hosts, network
