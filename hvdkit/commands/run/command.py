"""Runs ``hvdkit run``, from its options to its exit code."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from hvdkit.commands.options import output_errors
from hvdkit.commands.run import restarts
from hvdkit.commands.run.config import RunConfig
from hvdkit.commands.run.engines import engine_environment
from hvdkit.commands.run.host_probe import temporary_problem
from hvdkit.commands.run.hosts import place_ranks
from hvdkit.commands.run.job import Job, prepare, with_interpreter
from hvdkit.commands.run.kubernetes import kubernetes
from hvdkit.commands.run.output import OutputWriter
from hvdkit.commands.run.preflight import raise_problems
from hvdkit.errors import ClusterError
from hvdkit.watchdog.job_metrics import JobMetrics
from hvdkit.watchdog.metrics_server import MetricsServer, url_of
from hvdkit.watchdog.otel_export import exports_metrics, start_export
from hvdkit.watchdog.verdict import Verdict

# Arguments that engines interpret themselves: the separator of programs, and the end of options.
_ENGINES_OWN = (":", "--")


def run(config: RunConfig, program: Sequence[str]) -> int | str:
    """Start ``program`` on all ranks and wait for its end, with as many restarts as ``config`` allows.

    Returns:
        The exit code of the last attempt, see :class:`RunConfig`. With ``dry_run``, the command that would run.

    Raises:
        ValueError: an option, a host or the program is invalid; nothing has been started.
        ClusterError: a host fails the check, an engine is missing, or a disk is full; nothing has been started.
    """
    if config.k8s:
        return kubernetes(config, with_interpreter(program, "python"))
    program = with_interpreter(program)
    job = prepare(config, program)
    if config.dry_run:
        hosts = place_ranks(job.hosts, config.np)
        network, answers = job.network(hosts)
        raise_problems(answers)
        return str(job.command_line(hosts, plain(program), network.interface))
    return start(job, program).code


def start(job: Job, program: Sequence[str]) -> Verdict:
    """Start ``program`` on all ranks and wait for its end; return the verdict on the last attempt.

    Raises:
        ValueError: the folder for logs cannot be written, or metrics cannot be served or exported.
        ClusterError: a host fails the check, or a disk is full; nothing has been started.
    """
    config = job.config
    problem = temporary_problem(engine_environment(job.environment, job.names), job.temporary_bytes)
    if problem is not None:
        raise ClusterError(problem)
    if config.logs is not None:
        with output_errors("--logs", config.logs, "folder"):
            config.logs.mkdir(parents=True, exist_ok=True)
    output = OutputWriter({1: sys.stdout.buffer, 2: sys.stderr.buffer}, config.logs, config.output)
    with contextlib.ExitStack() as at_end:
        metrics = JobMetrics()
        is_exported = exports_metrics()
        if is_exported:
            at_end.callback(start_export(metrics))
        if (address := config.metrics_address) is not None:
            listener = address.listen()
            output.line(f"hvdkit run: metrics: {url_of(listener)}")
            server = MetricsServer(listener, metrics.text)
            server.start()
            at_end.callback(server.close)
        is_read = is_exported or address is not None
        return restarts.run(replace(job, metrics=metrics) if is_read else job, program, output)


def plain(program: Sequence[str]) -> list[str]:
    """Return an equivalent command that every engine passes on unchanged.

    Example:
        >>> plain(["python", "x.py", "a", ":", "b"])
        ['sh', '-c', 'exec python x.py a : b']
        >>> plain(["python", "x.py", "a b"])
        ['python', 'x.py', 'a b']
    """
    if any(word in _ENGINES_OWN for word in program):
        return ["sh", "-c", f"exec {shlex.join(program)}"]
    return list(program)
