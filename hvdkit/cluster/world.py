"""The world of this process: ranks, chief, hosts, mesh. Each process has one, started by :func:`init`."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, cast

from hvdkit.cluster import devices, engine, logs, settings
from hvdkit.cluster.call_order import CallOrder
from hvdkit.cluster.exchange import ObjectExchange
from hvdkit.cluster.lone_training import lone_training
from hvdkit.cluster.mesh import DATA, Group, HorovodProcessSet, groups_along, sets_of_any_mesh
from hvdkit.cluster.progress import progress
from hvdkit.cluster.rank_facts import gather_rank_facts
from hvdkit.errors import ClusterError, HvdkitError, describe
from hvdkit.machine import processes
from hvdkit.machine.cores import affinity
from hvdkit.machine.environment import ineffective_settings
from hvdkit.machine.launcher import launched_rank
from hvdkit.profiling.settings import ProfileSettings
from hvdkit.watchdog.ending import EngineEnd, ending
from hvdkit.watchdog.reporter import reporter
from hvdkit.watchdog.uncaught import uncaught_errors

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """This process's rank, and the ranks, hosts and mesh of the job.

    Attributes:
        rank: number of this process, 0 to ``size - 1``.
        size: number of processes.
        local_rank: number of this process on its host.
        local_size: number of processes on this host.
        hosts: the host name of each rank, in rank order.
        is_chief: True on rank 0, the only rank that writes checkpoints, summaries and messages for users.
        mesh: axis names and sizes, e.g. ``{"data": 4}``; their product is ``size``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> isinstance(cluster, hk.Cluster), len(cluster.hosts) == cluster.size, cluster.mesh["data"] == cluster.size
        (True, True, True)
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]
    is_chief: bool
    mesh: Mapping[str, int]


@dataclass
class _World:
    cluster: Cluster
    horovod: ModuleType | SimpleNamespace
    exchange: ObjectExchange
    end_horovod: Callable[[], None] = lambda: None
    communicator: MPI.Intracomm | None = None
    call_order: CallOrder = field(default_factory=CallOrder)
    process_sets: dict[tuple[int, ...], HorovodProcessSet] = field(default_factory=dict)  # Horovod's, by their ranks
    exchanges: dict[tuple[int, ...], ObjectExchange] = field(default_factory=dict)


_world: _World | None = None
_ended = False
_lock = threading.Lock()


def init(mesh: Mapping[str, int] | None = None) -> Cluster:
    """Start Horovod (and MPI if available), pin this rank's device, and divide the cores among ranks.

    Call it once at the top of a script, before the first TensorFlow operation. Calling it again returns the same
    cluster. Works under ``horovodrun`` (MPI and Gloo), ``mpirun``, ``srun``, and without a launcher (a world of one
    rank).

    Args:
        mesh: axis names and sizes whose product is the world size, e.g. ``{"data": 2, "model": 2}``. Ranks are
            consecutive along the last axis; batches differ along "data". Default: ``{"data": size}``.

    Returns:
        This process's rank, and the ranks, hosts and mesh of the job.

    Raises:
        ImportError: TensorFlow or Horovod is missing; the message includes the command that installs it.
        ClusterError: the world differs from the launcher's settings, was started with another mesh, or another rank's
            mesh is invalid.
        ValueError: the product of ``mesh`` is not the world size, ``HVDKIT_PROFILE`` or ``HVDKIT_METRICS`` is invalid,
            or its port is in use.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> print(f"rank {cluster.rank} of {cluster.size} on {cluster.hosts[cluster.rank]}")
        rank ... of ... on ...
    """
    global _world
    with _lock:
        if _world is None:
            _world = _start(mesh)
            make_groups(list(_world.process_sets))
        elif mesh is not None and list(mesh.items()) != list(_world.cluster.mesh.items()):
            expected = f"{dict(_world.cluster.mesh)}, as in the first hk.init()"
            raise ClusterError(describe("mesh", dict(mesh), expected, "call hk.shutdown() first"))
        return _world.cluster


def _start(mesh: Mapping[str, int] | None) -> _World:
    """Start the world. The order matters: environment, sentinel, MPI and Horovod, devices, agreement with all ranks."""
    launched = launched_rank()
    if _ended and launched.size > 1 and launched.controller == "gloo":
        # The rendezvous server of Horovod 0.28.1 does not drop outdated addresses, and a rank that gets one aborts.
        raise ClusterError(
            "hk.init(): called after hk.shutdown() under horovodrun --gloo, where Horovod cannot be initialized again; "
            "call hk.shutdown() only at the end, or start under MPI"
        )
    profile_settings = ProfileSettings.from_environment(os.environ)
    settings.set_environment(launched, timeline=profile_settings is not None and profile_settings.timeline)
    settings.set_stall_limit()
    progress().begin_world()
    watchdog = reporter()
    offer = watchdog.begin(launched)
    threads_before = processes.threads(os.getpid())
    hvd, communicator, horovod_sets = engine.start_horovod(launched, sets_of_any_mesh(mesh, launched.size))
    waiters = processes.threads(os.getpid()) - threads_before
    rank = hvd.rank()
    size = hvd.size()
    logs.configure(rank, size)
    if rank == 0 and (warning := ineffective_settings(os.environ)) is not None:
        logs.warn_once(warning)
    order = CallOrder()
    exchange = ObjectExchange(hvd, communicator, order=order)
    end_horovod = EngineEnd(hvd.shutdown)
    if size > 1:
        abort = None if communicator is None else communicator.Abort
        uncaught_errors().install(rank, end_horovod, abort)
        atexit.register(_leave)  # after Horovod has registered its handler, so that this one runs first
    else:
        uncaught_errors().install_alone()
    devices.select_gpu(hvd.local_rank(), hvd.local_size())
    masks = _local_affinities(exchange, hvd.local_size())
    devices.set_threads(masks)
    devices.bind_to_core(hvd.local_rank(), hvd.local_size(), masks)
    facts, axes = gather_rank_facts(mesh, exchange, size, offer, watchdog.problem)
    hosts = tuple(each.host for each in facts)
    watchdog.join(rank, hosts, [each.place for each in facts], facts[0].offer, waiters, engine.finalize_mpi)
    if size > 1:
        lone_training().begin(size)
        uncaught_errors().doubt = lone_training().doubt
    cluster = Cluster(
        rank=rank,
        size=size,
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        hosts=hosts,
        is_chief=rank == 0,
        mesh=axes,
    )
    if profile_settings is not None:
        from hvdkit.profiling.rank_profile import RankProfile
        from hvdkit.profiling.recorder import Recorder

        warn = logs.get_logger().warning
        progress().profile = Recorder(profile_settings, RankProfile(rank, hosts[rank]), exchange, hvd, warn)
    return _World(
        cluster=cluster,
        horovod=hvd,
        exchange=exchange,
        end_horovod=end_horovod,
        communicator=communicator,
        call_order=order,
        process_sets=horovod_sets,
    )


def _local_affinities(exchange: ObjectExchange, local_size: int) -> list[frozenset[int]]:
    """Return the affinity of every rank on this host.

    Without MPI, an exchange through Horovod would start TensorFlow before its threads are set. In that case no launcher
    binds ranks to cores, so all ranks have the affinity of this one.
    """
    if not exchange.over_mpi:
        return [affinity()] * local_size
    this_host = socket.gethostname()
    return [mask for host, mask in exchange.allgather((this_host, affinity())) if host == this_host]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Provide a world of one rank inside the context, without Horovod and MPI; no effect after :func:`init`.

    For single-process work on models that are usually sharded across ranks, such as an export.
    """
    global _world
    if _world is not None:
        yield
        return
    host = socket.gethostname()
    cluster = Cluster(rank=0, size=1, local_rank=0, local_size=1, hosts=(host,), is_chief=True, mesh={"data": 1})
    horovod = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    _world = _World(cluster, horovod, ObjectExchange(horovod))
    try:
        yield
    finally:
        _world = None


def _current() -> _World:
    if _world is None:
        remedy = "add it at the top of the script"
        error: HvdkitError = ClusterError(f"hk.init(): not called yet, expected before any other call; {remedy}")
        error.page = None  # the message says it all
        uncaught_errors().install_alone()  # its report leaves out hvdkit's frames
        raise error
    return _world


def cluster() -> Cluster:
    """Return the cluster started by :func:`init`. Raises ClusterError before :func:`init`."""
    return _current().cluster


def group(axis: str) -> Group:
    """Return this rank's group along ``axis`` of the mesh; a group of one rank if the mesh does not have that axis.

    Raises:
        ClusterError: before :func:`init`.
    """
    world = _current()
    rank = world.cluster.rank
    mesh = world.cluster.mesh
    if axis not in mesh:
        return Group(axis, (rank,), 0)
    ranks = next(ranks for ranks in groups_along(axis, mesh) if rank in ranks)
    return Group(axis, ranks, ranks.index(rank), world.process_sets.get(ranks))


def data_group() -> Group | None:
    """Return the ranks with different rows of a batch, as a process set; None if these are all ranks."""
    ranks = group(DATA)
    return None if ranks.size == size() else ranks


def make_groups(sets: Sequence[tuple[int, ...]]) -> list[Group | None]:
    """Return a group for collectives among the ranks of each of ``sets``, or None if this rank is not in the set.

    Every rank must call it, with the same sets, each in ascending order.

    Raises:
        ClusterError: before :func:`init`, or Horovod cannot create process sets any more.
    """
    world = _current()
    rank = world.cluster.rank
    size = world.cluster.size
    known = world.process_sets
    if new := [ranks for ranks in dict.fromkeys(sets) if 1 < len(ranks) < size and ranks not in known]:
        threads_before = processes.threads(os.getpid())
        engine.add_process_sets(horovod(), known, new, over_mpi=world.exchange.over_mpi)
        reporter().add_waiters(processes.threads(os.getpid()) - threads_before)
    groups = [Group("", ranks, ranks.index(rank), known.get(ranks)) if rank in ranks else None for ranks in sets]
    for group in groups:
        if group is not None:
            exchange(group)  # create it now that all its ranks are here: MPI would block in C for a missing one
    return groups


def horovod() -> ModuleType:
    """Return the running ``horovod.tensorflow``. Raises ClusterError before :func:`init`."""
    return cast("ModuleType", _current().horovod)


def exchange(group: Group | None = None) -> ObjectExchange:
    """Return the exchange of Python objects among the ranks of ``group``; default: all ranks.

    Raises:
        ClusterError: before :func:`init`.
    """
    world = _current()
    if group is None or group.size == world.cluster.size:
        return world.exchange
    if group.ranks not in world.exchanges:
        world.exchanges[group.ranks] = ObjectExchange(world.horovod, world.communicator, group, world.call_order)
    return world.exchanges[group.ranks]


def call_order() -> CallOrder:
    """Return the order of this rank's eager collectives. Raises ClusterError before :func:`init`."""
    return _current().call_order


def is_initialized() -> bool:
    """Return True between :func:`init` and :func:`shutdown`."""
    return _world is not None


def rank() -> int:
    """Return the number of this process, 0 to ``size() - 1``.

    Raises:
        ClusterError: before ``hk.init``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> 0 <= hk.rank() < hk.size()
        True
    """
    return _current().cluster.rank


def size() -> int:
    """Return the number of processes.

    Raises:
        ClusterError: before ``hk.init``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> hk.allreduce(1, hk.Sum) == hk.size()
        True
    """
    return _current().cluster.size


def local_rank() -> int:
    """Return the number of this process on its host, 0 to ``local_size() - 1``.

    Raises:
        ClusterError: before ``hk.init``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> 0 <= hk.local_rank() < hk.local_size()
        True
    """
    return _current().cluster.local_rank


def local_size() -> int:
    """Return the number of processes on this host.

    Raises:
        ClusterError: before ``hk.init``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> cluster.hosts.count(cluster.hosts[hk.rank()]) == hk.local_size()
        True
    """
    return _current().cluster.local_size


def is_chief() -> bool:
    """Return True on rank 0, the chief, and False on other ranks.

    Guard side effects with it, such as printing or writing files, but not collectives, which every rank must call.

    Raises:
        ClusterError: before ``hk.init``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> loss = hk.allreduce(0.25)  # on every rank
        >>> if hk.is_chief():
        ...     print(f"loss {loss}")
        loss 0.25
    """
    return _current().cluster.is_chief


def shutdown() -> None:
    """Leave the world. Every rank must call it; without ``hk.init`` it has no effect.

    A script that ends normally does not need it. With process sets, including those of a mesh, it waits until the
    other ranks have called it, too, or have ended. Afterwards ``hk.init`` may be called again, e.g. with another mesh,
    but not under ``horovodrun --gloo``.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> hk.shutdown()
        >>> hk.rank()
        Traceback (most recent call last):
            ...
        hvdkit.errors.ClusterError: hk.init(): not called yet, expected before any other call; ...
    """
    global _world, _ended
    with _lock:
        if _world is not None:
            lone_training().end()
            progress().end_profile(finish=True)
            atexit.unregister(_leave)
            reporter().leave_world(keeps_horovod=bool(_world.process_sets))
            uncaught_errors().remove()
            _world.exchange.close()
            _world.end_horovod()
            _world = None
            _ended = True


def _leave() -> None:
    """At the interpreter's exit, notify the other ranks, then shut Horovod down, which ends their collectives.

    Process sets without this rank may still need Horovod, and so does a profile that has not been written; then it is
    shut down once the other ranks have ended as well.
    """
    global _world
    if _world is None or os.getpid() != reporter().pid or ending().begun:
        return
    lone_training().end()
    profile = progress().profile
    is_profiled = profile is not None and not profile.is_finished
    reporter().leave(keeps_horovod=bool(_world.process_sets) or is_profiled)
    if is_profiled:
        progress().end_profile(finish=reporter().await_others())
    reporter().note_exit("Horovod has been shutting down", is_bounded=True)
    _world.exchange.close()
    _world.end_horovod()
    reporter().await_others()
    reporter().note_exit("handlers of atexit, or the interpreter and MPI, have been ending", is_bounded=False)
    reporter().remove()
    uncaught_errors().remove()
    _world = None


def _at_exit() -> None:
    """Finish after all other ``atexit`` handlers: this one was registered first, when hvdkit was imported."""
    if ending().begun:
        reporter().finish()
    elif _world is not None and (_world.cluster.size == 1 or os.getpid() == reporter().pid):
        shutdown()


atexit.register(_at_exit)
