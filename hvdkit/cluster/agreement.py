"""Comparison of values across ranks: either all ranks raise the same error, or all continue.

If only one rank raised, the others would wait for it in the exchange. So every rank sends a :class:`Contribution` with
its value or its exception, and all ranks evaluate the same list:

* :func:`gather` returns the values of all ranks; an exception on one rank raises an error on all of them;
* :func:`run_on_all_ranks` is the same for an action whose result stays on its rank;
* :func:`compare` raises on every rank if one value differs;
* :func:`agree` does both.

Other ranks raise an error of hvdkit that names the rank and its exception; for an exception marked by
:func:`for_all_ranks`, they raise a copy of it.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, NoReturn, TypeVar, cast

from hvdkit.cluster.exchange import ObjectExchange
from hvdkit.errors import CollectiveMismatchError, HvdkitError, describe, listed
from hvdkit.watchdog.uncaught import blame_another_rank

T = TypeVar("T")
D = TypeVar("D")
_MAX_RANKS_SHOWN = 4
_MISSING = object()
_FOR_ALL_RANKS = "_hvdkit_for_all_ranks"  # attribute of exceptions that other ranks raise, too
SAME_CALLS = "call the same collectives in the same order on every rank"


class Problem(NamedTuple):
    """An exception of one rank in a form that other ranks can raise. The exception itself may not be picklable.

    Attributes:
        error: class of the error that other ranks raise.
        text: class and message of the exception.
        copy: the pickled exception, if other ranks raise it instead.
    """

    error: type[HvdkitError]
    text: str
    copy: bytes = b""

    @classmethod
    def of(cls, exception: Exception, error: type[HvdkitError]) -> Problem:
        """Return the problem for ``exception``. Other ranks raise ``error``, or the subclass of it that was raised."""
        if isinstance(exception, error):
            error = next(each for each in type(exception).__mro__ if each.__module__ == HvdkitError.__module__)
        copy = b""
        if hasattr(exception, _FOR_ALL_RANKS):
            with contextlib.suppress(Exception):
                copy = pickle.dumps(exception)
        return cls(error, f"{type(exception).__name__}: {exception}", copy)

    def reraise(self, call: str, rank: int) -> NoReturn:
        """Raise this problem of another ``rank``."""
        error = self.error(f"{call}: rank {rank} raised {self.text}")
        same = _unpickle(self.copy)
        if isinstance(same, Exception):
            blame_another_rank(same)
            raise same from error
        raise error


def for_all_ranks(exception: Exception) -> None:
    """Mark an exception that decides for all ranks: other ranks raise it, too, if it can be pickled."""
    setattr(exception, _FOR_ALL_RANKS, True)


@dataclass
class Contribution(Generic[T]):
    """A rank's message to all other ranks.

    Attributes:
        kind: the call that sends it, for messages; the same on every rank.
        payload: the value.
        fault: the exception that this rank caught instead, or None.
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
        exchange: exchange among the ranks that take part. All of them must call this function.
        kind: name of the call in messages, and in reports of waiting ranks; the same on every rank.
        value: returns this rank's value, which must be picklable.
        error: class of the error that other ranks raise if ``value`` raises here; a subclass of it is kept.

    Raises:
        Exception: the exception of ``value`` on this rank.
        HvdkitError: ``error``; it names the lowest rank with an exception.
        CollectiveMismatchError: a rank called another collective.
    """
    if exchange.size == 1:
        return [value()]
    problem: Exception | None = None
    try:
        # Send only the fields of a Contribution: shorter messages fit into a single MPI collective at more ranks.
        data = pickle.dumps((kind, value(), None), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as exception:
        problem = exception
        data = pickle.dumps((kind, None, Problem.of(exception, error)), protocol=pickle.HIGHEST_PROTOCOL)
    parts = [_unpickle(part) for part in exchange.allgather_bytes(data, kind)]
    if problem is not None:
        raise problem
    return [cast("Contribution[T]", part).payload for part in check_calls(parts, exchange.ranks)]


def run_and_describe(
    exchange: ObjectExchange,
    kind: str,
    action: Callable[[], T],
    describe: Callable[[T], D],
    *,
    error: type[HvdkitError] = CollectiveMismatchError,
) -> tuple[T, list[D]]:
    """Run ``action`` on every rank; return this rank's result, and the description of every rank's result.

    Args:
        exchange, kind, error: as for :func:`gather`.
        action: the function to run. Its result need not be picklable.
        describe: returns a picklable description of the result.

    Raises:
        Exception: the exception of ``action`` or ``describe`` on this rank.
        HvdkitError: ``error``; it names the lowest rank with an exception.
    """
    results: list[T] = []

    def run() -> D:
        results.append(action())
        return describe(results[0])

    descriptions = gather(exchange, kind, run, error=error)
    return results[0], descriptions


def run_on_all_ranks(
    exchange: ObjectExchange, kind: str, action: Callable[[], T], *, error: type[HvdkitError] = CollectiveMismatchError
) -> T:
    """Run ``action`` on every rank; return this rank's result. Args and Raises as for :func:`run_and_describe`."""
    return run_and_describe(exchange, kind, action, lambda _: None, error=error)[0]


def check_calls(sent: Sequence[object], ranks: Sequence[int]) -> list[object]:
    """Return the contributions of all ``ranks`` from the messages that they sent.

    Raises:
        HvdkitError: the problem of the lowest rank that has one.
        CollectiveMismatchError: a rank sent a :class:`Contribution` of another kind, or another message.
    """
    parts = [_contribution(part) for part in sent]
    for rank, part in zip(ranks, parts, strict=True):
        if isinstance(part, Contribution) and part.fault is not None:
            part.fault.reraise(part.kind, rank)
    functions = {part.kind.partition("(")[0] if isinstance(part, Contribution) else None for part in parts}
    remedy = SAME_CALLS if len(functions) > 1 else "pass the same arguments on every rank"
    compare(parts, "collective", remedy, ranks=ranks, key=_kind, show=shown_calls)
    return parts


def find_outlier(values: Sequence[object]) -> tuple[int, int] | None:
    """Return the index of the first value that differs from the usual one, and the index of the first usual value.

    The usual value is that of the majority; without a majority, the first one. Values are equal if they compare equal
    or pickle to the same bytes, so that NaN equals itself. Returns None if all values are equal.

    Example:
        >>> find_outlier(["b", "a", "a"]), find_outlier(["b", "a"]), find_outlier(["a", "a"])
        ((0, 1), (1, 0), None)
    """
    first = values[0]
    if all(_equal(value, first) for value in values):
        return None
    # R. S. Boyer, J. S. Moore, "MJRTY: a fast majority vote algorithm" (1981): values need not be hashable.
    candidate = 0
    lead = 0
    for index, value in enumerate(values):
        if lead == 0:
            candidate = index
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
    key: Callable[[T], object] = lambda value: value,
    show: Callable[[T, T], tuple[str, str]] = lambda odd, usual: (repr(odd), repr(usual)),
) -> None:
    """Raise an error if the ranks' values differ.

    It names the lowest rank that differs from the majority; without a majority, from the first rank.

    Args:
        values: the value of each rank. All ranks must call this with the same values, as returned by :func:`gather`.
        what: name of the compared values, for the message.
        remedy: how to fix it, for the message.
        ranks: the rank of each value; default: 0, 1, ...
        error: class of the error.
        key: returns the part of a value that must be equal.
        show: returns descriptions of the value that differs and of the expected one, for the message.

    Raises:
        HvdkitError: ``error``: values differ.

    Example:
        >>> compare([2, 3, 2, 4], "n", "pass one everywhere", error=ValueError)
        Traceback (most recent call last):
        ...
        ValueError: n: got 3 on rank 1 (rank 3 also differs), expected 2, as on rank 0 and 1 other; pass one everywhere
    """
    keys = [key(value) for value in values]
    outlier = find_outlier(keys)
    if outlier is None:
        return
    odd, usual = outlier
    ranks = range(len(values)) if ranks is None else ranks
    differing = [rank for rank, each in zip(ranks, keys, strict=True) if not _equal(each, keys[usual])]
    got, expected = show(values[odd], values[usual])
    count = len(values) - len(differing) - 1
    others = f" and {count} other{'s' * (count > 1)}" if count else ""
    raise error(
        describe(what, f"{got} on rank {_listed(differing)}", f"{expected}, as on rank {ranks[usual]}{others}", remedy)
    )


def agree(
    exchange: ObjectExchange,
    value: Callable[[], T],
    what: str,
    remedy: str,
    *,
    key: Callable[[T], object] = lambda value: value,
    show: Callable[[T, T], tuple[str, str]] = lambda odd, usual: (repr(odd), repr(usual)),
) -> list[T]:
    """Return the value of every rank, after checking that they are equal: :func:`gather`, then :func:`compare`."""
    values = gather(exchange, what, value)
    compare(values, what, remedy, ranks=exchange.ranks, key=key, show=show)
    return values


def differing_indices(first: Sequence[object], second: Sequence[object]) -> list[int]:
    """Return the indices at which two lists differ, including those that only one list has.

    Example:
        >>> differing_indices("abc", "adcd")
        [1, 3]
    """
    pairs = itertools.zip_longest(first, second, fillvalue=_MISSING)
    return [index for index, (one, other) in enumerate(pairs) if one is _MISSING or one != other]


def _equal(one: object, other: object) -> bool:
    with contextlib.suppress(ValueError):  # arrays have no truth value
        if one == other:
            return True
    return pickle.dumps(one) == pickle.dumps(other)


def _listed(ranks: Sequence[int]) -> str:
    """Return the lowest rank, followed by the other ranks in brackets."""
    if len(ranks) == 1:
        return f"{ranks[0]}"
    if len(ranks) == 2:
        return f"{ranks[0]} (rank {ranks[1]} also differs)"
    return f"{ranks[0]} (ranks {listed(ranks[1:], _MAX_RANKS_SHOWN)} also differ)"


def _contribution(sent: object) -> object:
    """Return a rank's message as a Contribution, or unchanged if it belongs to another exchange."""
    if type(sent) is tuple and len(sent) == 3 and isinstance(sent[0], str) and isinstance(sent[2], Problem | None):
        return Contribution(*sent)
    return sent


def _kind(part: object) -> tuple[type, str] | None:
    """Return the part of a message that must be equal on all ranks; None for a message of another exchange."""
    return (type(part), part.kind) if isinstance(part, Contribution) else None


def shown_calls(odd: object, usual: object) -> tuple[str, str]:
    """Return descriptions of two ranks' calls, for messages: of calls of the same function, the arguments that differ.

    Example:
        >>> shown_calls(Contribution("f(a=2, b=4)", None), Contribution("f(a=2, b=5)", None))
        ('f(..., b=4)', 'f(..., b=5)')
    """
    got, expected = (str(each) if isinstance(each, Contribution) else "another exchange" for each in (odd, usual))
    name = got.partition("(")[0]
    ours = _arguments(got)
    theirs = _arguments(expected)
    are_alike = expected.startswith(f"{name}(") and len(ours) == len(theirs) > 1
    differing = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] if are_alike else []
    if not differing or len(differing) == len(ours):
        return got, expected
    shown = [", ".join(pair[index] for pair in differing) for index in (0, 1)]
    return f"{name}(..., {shown[0]})", f"{name}(..., {shown[1]})"


def _arguments(call: str) -> list[str]:
    """Return the keyword arguments of a call as text."""
    return re.split(r", (?=\w+=)", call.partition("(")[2].removesuffix(")"))


def _unpickle(data: bytes) -> object:
    """Unpickle a rank's message; None for the bytes of another exchange."""
    try:
        return pickle.loads(data)
    except Exception:
        return None
