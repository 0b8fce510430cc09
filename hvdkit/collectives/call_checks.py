"""Ranks compare their calls before an eager collective, so that a mistake raises on all ranks.

A rank that raised alone would leave the others waiting. Instead, every rank first sends the signature of its call, or
the error in its arguments, to all ranks. Then either all ranks raise the same error or all continue. Small values are
sent along with the signature, and the result is computed from them directly, without a second exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from hvdkit import cluster
from hvdkit.cluster import Group
from hvdkit.cluster.agreement import SAME_CALLS, Contribution, Problem, check_calls, compare, shown_calls
from hvdkit.errors import CollectiveMismatchError, describe

# Values up to this many bytes are sent along with the signature. At 1,000 ranks that is 16 MB per rank, still fast.
SMALL_BYTES = 16 * 1024
JOIN = "join()"
T = TypeVar("T")


@dataclass
class Call(Contribution[object]):
    """One rank's side of an eager collective.

    Attributes:
        kind: the collective with all arguments that must agree, for messages: ``allreduce(op=Sum)``.
        payload: the values, if small.
        dtypes: dtype name of each tensor.
        shapes: shape of each tensor; if ``uneven``, the first axis may differ between ranks.
        uneven: True for allgather and alltoall.
        problem: the exception to raise for this rank's arguments, or None.
        joinable: joined ranks need not take part: they contribute zeros.
    """

    payload: object = None
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    uneven: bool = False
    problem: Exception | None = None
    joinable: bool = False

    def signature(self) -> tuple[object, ...]:
        """Return the part that must be equal on all ranks."""
        inner = tuple(shape[1:] for shape in self.shapes) if self.uneven else self.shapes
        return (self.kind, self.dtypes, tuple(len(s) for s in self.shapes), inner)

    def __str__(self) -> str:
        if not self.shapes:
            return self.kind
        tensors = ", ".join(f"{d}{list(s)}" for d, s in list(zip(self.dtypes, self.shapes, strict=True))[:4])
        more = f", and {len(self.shapes) - 4} more" if len(self.shapes) > 4 else ""
        return f"{self.kind} of {tensors}{more}"


def agree_on_call(call: Call, group: Group | None = None) -> list[Call]:
    """Return the calls of all ranks of ``group`` (default: all ranks), in rank order, after checking that they match.

    Raises:
        Exception: this rank's arguments are invalid: ``call.problem``.
        CollectiveMismatchError: ranks differ, or another rank's arguments are invalid; it names the rank.
    """
    ranks = range(cluster.size()) if group is None else group.ranks
    if len(ranks) == 1:
        if call.problem is not None:
            raise call.problem
        return [call]
    sent: Contribution[object] = call
    if call.problem is not None:
        sent = Contribution(call.kind, None, Problem.of(call.problem, CollectiveMismatchError))
    calls = cast("list[Call]", cluster.exchange(group).allgather(sent, str(call)))
    if call.problem is not None:
        raise call.problem
    if len({each.signature() if type(each) is Call else None for each in calls}) > 1:
        _check_signatures(calls, ranks)
    return calls


def exchange_payloads(kind: str, payload: Callable[[], T], group: Group | None = None) -> list[T]:
    """Return ``payload()`` of all ranks of ``group``, in rank order. All of them must make the call ``kind``.

    Raises:
        Exception: the exception of ``payload`` on this rank.
        CollectiveMismatchError: as for :func:`agree_on_call`.
    """
    call = Call(kind)
    try:
        call.payload = payload()
    except Exception as error:
        call.problem = error
    return [cast("T", each.payload) for each in agree_on_call(call, group)]


def _check_signatures(calls: list[Call], ranks: Sequence[int]) -> None:
    """Raise if the ranks' calls do not match; return if they differ only because some ranks have joined."""
    if not all(type(each) is Call for each in calls):
        check_calls(calls, ranks)
    active = [(rank, each) for rank, each in zip(ranks, calls, strict=True) if each.kind != JOIN]
    if len(active) < len(calls) and not active[0][1].joinable:
        joined = next(rank for rank, other in zip(ranks, calls, strict=True) if other.kind == JOIN)
        raise CollectiveMismatchError(
            f"join: rank {joined} has joined, but rank {active[0][0]} called {active[0][1]}; after hk.join() on one "
            "rank, other ranks may only call hk.barrier or hk.allreduce (dense, Sum or Average) until they join"
        )
    ranks = [rank for rank, _ in active]
    calls = [each for _, each in active]
    compare(calls, "collective", SAME_CALLS, ranks=ranks, key=lambda c: (c.kind, len(c.shapes)), show=shown_calls)
    first = calls[0]
    remedy = "pass equal dtypes and shapes on every rank" + " (only the first axis may differ)" * first.uneven

    def comparable(tensor: tuple[str, tuple[int, ...]]) -> tuple[object, ...]:
        dtype, shape = tensor
        return dtype, len(shape), shape[1:] if first.uneven else shape

    for i in range(len(first.shapes)):
        each = [(call.dtypes[i], call.shapes[i]) for call in calls]
        compare(each, f"{first.kind}: tensor {i}", remedy, ranks=ranks, key=comparable, show=_shown_tensors)


def _shown_tensors(odd: tuple[str, tuple[int, ...]], usual: tuple[str, tuple[int, ...]]) -> tuple[str, str]:
    """Return descriptions of two ranks' tensors, for messages."""
    return f"{odd[0]}{list(odd[1])}", f"{usual[0]}{list(usual[1])}"


def attempt(check: Callable[[], None]) -> Exception | None:
    """Run ``check``; return its exception, to be raised on all ranks together, or None."""
    try:
        check()
    except Exception as error:
        return error
    return None


def check_root(root: object, group: Group | None = None) -> None:
    """Raise ValueError if ``root`` is not a rank, or not in ``group``."""
    ranks = range(cluster.size()) if group is None else group.ranks
    if not isinstance(root, (int, np.integer)) or isinstance(root, bool) or root not in ranks:
        expected = f"a rank, 0 to {cluster.size() - 1}" if group is None else f"one of the ranks {list(ranks)}"
        raise ValueError(describe("root", root, expected, "pass the root's rank"))
