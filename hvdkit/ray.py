"""Runs a function on ranks that are actors of a Ray cluster. Ray is imported by the first call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from hvdkit.commands.run.config import RunConfig
from hvdkit.commands.run.output import Shown
from hvdkit.commands.run.ray_job import Strategy, check_resources, reserved
from hvdkit.commands.run.run_function import call_on_ranks, function_call
from hvdkit.errors import integer
from hvdkit.machine.terminal import on_terminal

__all__ = ["run"]

_Result = TypeVar("_Result")


def run(
    function: Callable[..., _Result],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    num_workers: int = 2,
    resources: Mapping[str, float] | None = None,
    strategy: Strategy = "PACK",
    restarts: int = 0,
    wait: float = 10.0,
    env: Sequence[str] = (),
    logs: str | os.PathLike[str] | None = None,
    output: Shown | None = None,
    grace: float = 30.0,
) -> list[_Result]:
    """Call a function on several ranks of a Ray cluster, and return what it returned on each rank.

    As ``hk.run``, but each rank is a process of a Ray actor, which has its part of a placement group. Horovod's Gloo
    connects the ranks. Without a cluster, Ray starts one on this machine.

    Args:
        function: the function. It calls ``hk.init()``, and is pickled as for ``hk.run``.
        args: its positional arguments, the same on every rank.
        kwargs: its keyword arguments, the same on every rank.
        num_workers: number of ranks.
        resources: Ray's resources of each rank, e.g. ``{"CPU": 4, "GPU": 1}``; default: one CPU.
        strategy: Ray's strategy of placement.
        restarts: number of restarts after failures. A function with ``hk.fit(logdir=...)`` or ``hk.Supervisor``
            continues from its newest checkpoint.
        wait: seconds to wait for the cluster's resources.
        env: names of environment variables to pass on, in addition to those that ``hvdkit run`` passes on.
        logs: folder for a log of each rank.
        output: which lines to show, as for ``hk.run``.
        grace: seconds for ranks to save after Ctrl-C before they are killed.

    Returns:
        The results, in the order of the ranks. Ranks are numbered node by node.

    Raises:
        TypeError: an argument has the wrong type, or something cannot be pickled.
        ValueError: an option is invalid; nothing has been started.
        ClusterError: Ray is missing, the cluster has not enough free resources, or this process is a rank of a job.
        HvdkitError: a rank or its actor was killed, or has ended without a result. The message names the rank.
        Exception: the exception of the rank that failed first. Its ``__cause__`` shows the rank and the traceback.

    Examples:
        >>> import hvdkit as hk
        >>> def train(scale):
        ...     cluster = hk.init()
        ...     return scale * cluster.rank
        >>> def main():
        ...     print(hk.ray.run(train, args=(10,), num_workers=2))  # [0, 10]
        >>> try:
        ...     hk.ray.run(train, args=(10,), resources={"GPU": 0})
        ... except ValueError as error:
        ...     print(error)
        resources['GPU']: got 0, expected a positive number; write e.g. resources={"CPU": 4, "GPU": 1}
    """
    call = function_call("hk.ray.run", function, args, kwargs)
    config = RunConfig(
        np=integer("num_workers", num_workers, minimum=1),
        engine="gloo",
        max_restarts=integer("restarts", restarts, minimum=0),
        env=tuple(env),
        logs=None if logs is None else Path(logs),
        output=output or ("merged" if on_terminal() else "all"),
        grace=grace,
    )
    with reserved(num_workers, check_resources(resources), strategy, wait) as reservation:
        return [cast("_Result", result) for result in call_on_ranks("hk.ray.run", call, config, reservation)]
