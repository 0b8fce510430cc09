"""Collectives of Python objects, and the barrier."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

from hvdkit import cluster
from hvdkit.collectives.call_checks import Call, agree_on_call, check_root, exchange_payloads
from hvdkit.collectives.process_sets import RankGroup, describe_group, resolve
from hvdkit.collectives.refusal import require_allowed
from hvdkit.errors import describe

T = TypeVar("T")


def barrier(*, process_set: RankGroup = None, group: RankGroup = None) -> None:
    """Wait until every rank has called barrier.

    Args:
        process_set: the ranks that take part, an ``hk.ProcessSet`` or an axis of the mesh; default: all.
        group: alias of ``process_set``.

    Raises:
        CollectiveMismatchError: a rank called another collective instead.
        ClusterError: a rank left the job.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> if hk.local_rank() == 0:
        ...     pass  # download the data, once per host
        >>> hk.barrier()  # the other ranks wait for it
    """
    members = resolve(process_set, group)
    agree_on_call(Call(f"barrier({describe_group(members)})", joinable=True), members)


def broadcast_object(obj: object, root: int = 0, *, process_set: RankGroup = None, group: RankGroup = None) -> Any:
    """Return rank ``root``'s picklable ``obj`` on every rank.

    Args:
        obj: any object that can be pickled; only the object of ``root`` is sent.
        root: the rank whose object is sent, by its number in the world.
        process_set: as for ``hk.barrier``.
        group: as for ``hk.barrier``.

    Returns:
        A copy of the object of ``root``.

    Raises:
        ValueError: ``root`` is not a rank, or not in ``process_set``.
        TypeError: ``obj`` cannot be pickled on ``root``.
        CollectiveMismatchError: a rank called another collective instead, or its arguments were invalid.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> hk.broadcast_object({"run": "baseline", "lr": 0.1} if hk.is_chief() else None)
        {'run': 'baseline', 'lr': 0.1}
    """
    members = resolve(process_set, group)
    kind = f"broadcast_object({', '.join(filter(None, [f'root={root}', describe_group(members)]))})"
    require_allowed(kind)

    def pickled() -> bytes:
        check_root(root, members)
        return _pickle(obj) if cluster.rank() == root else b""

    objects = exchange_payloads(kind, pickled, members)
    return pickle.loads(objects[root if members is None else members.ranks.index(root)])


def allgather_object(obj: T, *, process_set: RankGroup = None, group: RankGroup = None) -> list[T]:
    """Return the picklable ``obj`` of every rank, in rank order.

    Args:
        obj: any object that can be pickled.
        process_set: as for ``hk.barrier``.
        group: as for ``hk.barrier``.

    Returns:
        N objects, on every rank.

    Raises:
        TypeError: ``obj`` cannot be pickled.
        CollectiveMismatchError: a rank called another collective instead, or its ``obj`` cannot be pickled.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> names = hk.allgather_object(f"rank {hk.rank()}")  # ["rank 0", "rank 1", ...]
        >>> len(names) == hk.size(), names[0]
        (True, 'rank 0')
    """
    members = resolve(process_set, group)
    kind = f"allgather_object({describe_group(members)})"
    require_allowed(kind)
    return [pickle.loads(each) for each in exchange_payloads(kind, lambda: _pickle(obj), members)]


def _pickle(obj: object) -> bytes:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        got = f"{type(obj).__name__} ({error})"
        raise TypeError(describe("obj", got, "an object that can be pickled", "send its numbers or strings")) from error
