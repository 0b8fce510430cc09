"""Before an eager collective the ranks compare what they are about to do, so that a mistake is an error on all.

A rank that raised alone would leave the others waiting. Here every rank first sends its call's signature (or what
is wrong with its arguments) to all; then all raise the same error, or all go on. Small values ride along, and the
result is computed from them on the spot: for these the comparison is the whole exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdkit import cluster
from hvdkit.cluster import Group
from hvdkit.errors import CollectiveMismatchError, describe

# Below this many bytes a value goes along with its signature. At 1,000 ranks that is 16 MB a rank, still quick.
SMALL_BYTES = 16 * 1024
JOIN = "join()"


@dataclass
class Call:
    """One rank's side of an eager collective.

    Attributes:
        kind: the collective and everything all ranks must agree on, for people: ``allreduce(op=Sum)``.
        dtypes: dtype name of each tensor.
        shapes: shape of each tensor; where ``uneven`` the first axis may differ between ranks.
        uneven: True for allgather and alltoall.
        payload: the values, if small.
        problem: the exception that this rank's arguments deserve, or None.
        fault: what a rank with a problem has done, for people.
        joinable: ranks that have joined may stay away: they contribute zeros.
    """

    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    uneven: bool = False
    payload: Any = None
    problem: Exception | None = field(default=None)
    joinable: bool = False
    fault: str = "passed a bad argument"

    def agreed(self) -> tuple[Any, ...]:
        """Return what must be equal on all ranks."""
        inner = tuple(shape[1:] for shape in self.shapes) if self.uneven else self.shapes
        return (self.kind, self.dtypes, tuple(len(s) for s in self.shapes), inner)

    def __str__(self) -> str:
        if not self.shapes:
            return self.kind
        tensors = ", ".join(f"{d}{list(s)}" for d, s in list(zip(self.dtypes, self.shapes, strict=True))[:4])
        more = f", and {len(self.shapes) - 4} more" if len(self.shapes) > 4 else ""
        return f"{self.kind} of {tensors}{more}"


def agree(call: Call, group: Group | None = None) -> list[Call]:
    """Return the call of every rank of ``group`` (default: all), in rank order, after checking that they fit together.

    Raises:
        Exception: what a rank's own arguments deserve, on that rank.
        CollectiveMismatchError: ranks differ, or another rank's arguments are wrong; it names the rank.
    """
    ranks = range(cluster.size()) if group is None else group.ranks
    if len(ranks) == 1:
        if call.problem is not None:
            raise call.problem
        return [call]
    # The others need the words only; an exception of any class may not survive pickling.
    sent = call if call.problem is None else Call(call.kind, problem=ValueError(str(call.problem)), fault=call.fault)
    calls: list[Call] = cluster.exchange(group).allgather(sent, str(call))
    if call.problem is not None:
        raise call.problem
    for rank, other in zip(ranks, calls, strict=True):
        if not isinstance(other, Call):
            raise CollectiveMismatchError(
                f"collective: rank {rank} exchanges something else ({other!r}) while rank {cluster.rank()} called "
                f"{call}; call the same collectives in the same order on every rank"
            )
        if other.problem is not None:
            raise CollectiveMismatchError(f"{call.kind}: rank {rank} {other.fault}: {other.problem}")
    active = [(rank, other) for rank, other in zip(ranks, calls, strict=True) if other.kind != JOIN]
    if 0 < len(active) < len(calls) and not active[0][1].joinable:
        joined = next(rank for rank, other in zip(ranks, calls, strict=True) if other.kind == JOIN)
        raise CollectiveMismatchError(
            f"join: rank {joined} has joined, but rank {active[0][0]} called {active[0][1]}; after hk.join() on one "
            "rank, others call hk.allreduce (Sum or Average) or hk.barrier until they join, too"
        )
    for rank, other in active[1:]:
        lowest, first = active[0]
        if other.agreed() != first.agreed():
            raise CollectiveMismatchError(_difference(first, lowest, other, rank))
    return calls


def attempt(check: Callable[[], None]) -> Exception | None:
    """Run ``check`` and return its exception or None: a rank that raised alone would leave the others waiting."""
    try:
        check()
    except Exception as error:
        return error
    return None


def check_root(root: Any, group: Group | None = None) -> None:
    """Raise ValueError if ``root`` is not a rank, or not one of ``group``."""
    ranks = range(cluster.size()) if group is None else group.ranks
    if not isinstance(root, (int, np.integer)) or isinstance(root, bool) or root not in ranks:
        expected = f"a rank, 0 to {cluster.size() - 1}" if group is None else f"one of the ranks {list(ranks)}"
        raise ValueError(describe("root", root, expected, "pass the rank whose value counts"))


def _difference(first: Call, lowest: int, other: Call, rank: int) -> str:
    if len(first.shapes) == len(other.shapes):
        for i, mine in enumerate(first.shapes):
            if (first.dtypes[i], mine) != (other.dtypes[i], other.shapes[i]) and first.kind == other.kind:
                return (
                    f"{first.kind}: tensor {i} is {other.dtypes[i]}{list(other.shapes[i])} on rank {rank}, but "
                    f"{first.dtypes[i]}{list(mine)} on rank {lowest}; pass equal dtypes and shapes on every rank"
                    + (" (only the first axis may differ)" if first.uneven else "")
                )
    return (
        f"collective: rank {rank} called {other}, but rank {lowest} called {first}; "
        "call the same collectives in the same order on every rank"
    )
