"""Values compared over all ranks: every rank raises the same error, or none.

A rank that raised alone would leave the others waiting in the exchange. So every rank sends a :class:`Contribution`,
its value or the exception that it met instead, and all ranks judge the same list of them. Three functions serve:

* :func:`gather` returns every rank's value; what one rank raises is an error on all;
* :func:`compare` raises on every rank, given the same values there, if one differs;
* :func:`agree` does both.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from hvdkit.cluster.exchange import ObjectExchange
from hvdkit.errors import CollectiveMismatchError, HvdkitError, describe

T = TypeVar("T")
_MOST_NAMED = 4
_LACKING = object()
SAME_CALLS = "call the same collectives in the same order on every rank"


class Problem(NamedTuple):
    """An exception of one rank, as the others raise it: it may not survive pickling itself.

    Attributes:
        error: class of the error that they raise.
        words: class and message of the exception.
    """

    error: type[HvdkitError]
    words: str

    @classmethod
    def of(cls, exception: Exception, error: type[HvdkitError]) -> Problem:
        """Return what other ranks raise of ``exception``: an ``error``, or the subclass of it that it belongs to."""
        if isinstance(exception, error):
            error = next(each for each in type(exception).__mro__ if each.__module__ == HvdkitError.__module__)
        return cls(error, f"{type(exception).__name__}: {exception}")


@dataclass
class Contribution(Generic[T]):
    """What one rank sends to all others.

    Attributes:
        kind: the call in which it is made, for messages; the same on every rank.
        payload: the value.
        fault: the exception that this rank met instead, or None.
    """

    kind: str
    payload: T
    fault: Problem | None = None

    def __str__(self) -> str:
        return self.kind


def gather(
    exchange: ObjectExchange, kind: str, value: Callable[[], T], *, error: type[HvdkitError] = CollectiveMismatchError
) -> list[T]:
    """Return the value of every rank, in rank order; an exception on one rank raises an error on all.

    Args:
        exchange: among the ranks that take part. All of them call this.
        kind: names the call in messages, and in reports of ranks that wait; the same on every rank.
        value: computes this rank's, which can be pickled.
        error: what other ranks raise if ``value`` raises here; a subclass of it stays what it is.

    Raises:
        Exception: what ``value`` has raised on this rank.
        HvdkitError: ``error``, which names the lowest rank with an exception.
        CollectiveMismatchError: a rank called something else.
    """
    if exchange.size == 1:
        return [value()]
    problem: Exception | None = None
    try:
        # The fields of a Contribution: with fewer bytes more ranks need only one collective of MPI.
        data = pickle.dumps((kind, value(), None), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as exception:
        problem = exception
        data = pickle.dumps((kind, None, Problem.of(exception, error)), protocol=pickle.HIGHEST_PROTOCOL)
    parts = [_loaded(part) for part in exchange.allgather_bytes(data, kind)]
    if problem is not None:
        raise problem
    return [part.payload for part in check_calls(parts, exchange.ranks)]


def check_calls(sent: Sequence[Any], ranks: Sequence[int]) -> list[Any]:
    """Return the contributions of all ``ranks``, given what each has sent.

    Raises:
        HvdkitError: the lowest rank's problem.
        CollectiveMismatchError: a rank sent a :class:`Contribution` of another kind, or something else.
    """
    parts = [_contribution(part) for part in sent]
    for rank, part in zip(ranks, parts, strict=True):
        if isinstance(part, Contribution) and part.fault is not None:
            raise part.fault.error(f"{part.kind}: rank {rank} raised {part.fault.words}")
    compare(parts, "collective", SAME_CALLS, ranks=ranks, key=_kind, show=shown_calls)
    return parts


def odd_one(values: Sequence[Any]) -> tuple[int, int] | None:
    """Return the place of the first value that differs, and the first place of what the others have.

    The others have the majority's value, or rank 0's if there is no majority.

    Values are equal if they say so or have the same bytes, so that NaN equals itself.

    Returns:
        None if all are equal.

    Example:
        >>> odd_one(["b", "a", "a"]), odd_one(["b", "a"]), odd_one(["a", "a"])
        ((0, 1), (1, 0), None)
    """
    first = values[0]
    if all(_equal(value, first) for value in values):
        return None
    # R. S. Boyer, J. S. Moore, "MJRTY: a fast majority vote algorithm" (1981): values need not be hashable.
    candidate, lead = 0, 0
    for place, value in enumerate(values):
        if lead == 0:
            candidate = place
        lead += 1 if _equal(value, values[candidate]) else -1
    are_usual = [_equal(value, values[candidate]) for value in values]
    if 2 * sum(are_usual) <= len(values):
        are_usual = [_equal(value, first) for value in values]
    return are_usual.index(False), are_usual.index(True)


def compare(
    values: Sequence[T],
    what: str,
    remedy: str,
    *,
    ranks: Sequence[int] | None = None,
    error: type[HvdkitError] = CollectiveMismatchError,
    key: Callable[[T], Any] = lambda value: value,
    show: Callable[[T, T], tuple[str, str]] = lambda odd, usual: (repr(odd), repr(usual)),
) -> None:
    """Raise an error if the ranks' values differ.

    It names the lowest rank that differs from the majority, or from rank 0 if there is no majority.

    Args:
        values: of each rank. All ranks call this with the same values, as :func:`gather` returns them.
        what: names what is compared, for the message.
        remedy: what to do.
        ranks: the rank of each value; by default 0, 1, ...
        error: its class.
        key: returns what must be equal.
        show: returns how the message reads, given the value that differs and the one expected.

    Raises:
        HvdkitError: ``error``, if values differ.

    Example:
        >>> compare([2, 3, 2, 4], "n", "pass one everywhere", error=ValueError)
        Traceback (most recent call last):
        ...
        ValueError: n: got 3 on rank 1 (rank 3 also differs), expected 2, as on rank 0 and 1 other; pass one everywhere
    """
    keys = [key(value) for value in values]
    found = odd_one(keys)
    if found is None:
        return
    odd, usual = found
    ranks = range(len(values)) if ranks is None else ranks
    differing = [rank for rank, each in zip(ranks, keys, strict=True) if not _equal(each, keys[usual])]
    got, expected = show(values[odd], values[usual])
    alike = len(values) - len(differing) - 1
    others = f" and {alike} other{'s' * (alike > 1)}" if alike else ""
    raise error(
        describe(what, f"{got} on rank {_named(differing)}", f"{expected}, as on rank {ranks[usual]}{others}", remedy)
    )


def agree(
    exchange: ObjectExchange,
    value: Callable[[], T],
    what: str,
    remedy: str,
    *,
    error: type[HvdkitError] = CollectiveMismatchError,
    key: Callable[[T], Any] = lambda value: value,
    show: Callable[[T, T], tuple[str, str]] = lambda odd, usual: (repr(odd), repr(usual)),
) -> list[T]:
    """Return the values of all ranks, once they have turned out to be equal: :func:`gather`, then :func:`compare`."""
    values = gather(exchange, what, value, error=error)
    compare(values, what, remedy, ranks=exchange.ranks, error=error, key=key, show=show)
    return values


def unlike_places(first: Sequence[Any], second: Sequence[Any]) -> list[int]:
    """Return the places at which two lists differ; those that one of them lacks are among them.

    Example:
        >>> unlike_places("abc", "adcd")
        [1, 3]
    """
    pairs = itertools.zip_longest(first, second, fillvalue=_LACKING)
    return [place for place, (one, other) in enumerate(pairs) if one is _LACKING or one != other]


def _equal(one: Any, other: Any) -> bool:
    with contextlib.suppress(ValueError):  # arrays have no single truth
        if one == other:
            return True
    return pickle.dumps(one) == pickle.dumps(other)


def _named(ranks: Sequence[int]) -> str:
    """Return the lowest rank, and in brackets which others there are."""
    if len(ranks) == 1:
        return f"{ranks[0]}"
    if len(ranks) == 2:
        return f"{ranks[0]} (rank {ranks[1]} also differs)"
    shown = ", ".join(map(str, ranks[1 : 1 + _MOST_NAMED]))
    more = f" and {len(ranks) - 1 - _MOST_NAMED} more" * (len(ranks) > 1 + _MOST_NAMED)
    return f"{ranks[0]} (ranks {shown}{more} also differ)"


def _contribution(sent: Any) -> Any:
    """Return what a rank has sent as a Contribution; as it is if it belongs to another exchange."""
    if type(sent) is tuple and len(sent) == 3 and isinstance(sent[0], str) and isinstance(sent[2], Problem | None):
        return Contribution(*sent)
    return sent


def _kind(part: Any) -> Any:
    """Return what must be equal of two messages; None for one of another exchange."""
    return (type(part), part.kind) if isinstance(part, Contribution) else None


def shown_calls(odd: Any, usual: Any) -> tuple[str, str]:
    """Return what two ranks have called, for people."""
    odd, usual = (str(each) if isinstance(each, Contribution) else "another exchange" for each in (odd, usual))
    return odd, usual


def _loaded(data: bytes) -> Any:
    """Return what a rank has sent; None for the bytes of another exchange."""
    try:
        return pickle.loads(data)
    except Exception:
        return None
