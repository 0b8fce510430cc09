"""Divergence: parameters that must be equal on all ranks, and have come to differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import xxhash

from hvdkit import cluster
from hvdkit.cluster.agreement import compare, gather, unlike_places
from hvdkit.collectives.digests import digest
from hvdkit.collectives.shards import is_part
from hvdkit.collectives.variables import variable_name
from hvdkit.errors import describe


class _Report(NamedTuple):
    """What a rank says of itself once the combined digests differ."""

    step: int
    names: list[str]
    digests: list[bytes]


class DivergenceDetector:
    """Compares variables over all ranks every so many steps, bit for bit.

    A comparison costs a digest of all values, about as fast as memory is read, and an exchange of some 100 bytes per
    rank.
    Between two comparisons it costs nothing.

    For variables that are replicated: equal on all ranks because each rank makes the same updates. Not among them
    are the moving statistics of BatchNormalization, which follow each rank's own examples, the states of random
    generators, and gradients that are added up locally; :func:`replicated` gives a model's list without them.

    Args:
        variables: TensorFlow or Keras variables, the same list on every rank; or a function that returns it, for
            optimizers that make their slots late.
        every: steps between two comparisons.

    Raises:
        ValueError: ``every`` is no number of steps.

    Example::

        detector = DivergenceDetector(lambda: replicated(model, model.optimizer), every=500)
        for step, batch in enumerate(batches, start=1):
            train_step(batch)
            detector.check(step)
    """

    def __init__(self, variables: Iterable[Any] | Callable[[], Iterable[Any]], *, every: int) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(describe("every", every, "a number of steps >= 1", "pass e.g. 500"))
        self.every = every
        self._variables = variables if callable(variables) else list(variables)
        self._checked = 0
        self._equal: int | None = None

    def check(self, step: int) -> None:
        """Compare the variables if that is due. Every rank calls it after every step; steps may jump.

        Args:
            step: steps done, the same on every rank.

        Raises:
            CollectiveMismatchError: on every rank: variables differ. It names the rank, the first variable, the
                step, and the last step at which all were equal.
        """
        if step // self.every <= self._checked // self.every:
            return
        self._checked = step
        self.compare(step)

    def compare(self, step: int) -> None:
        """Compare the variables now. Args and Raises as for :meth:`check`."""
        if cluster.size() == 1:
            return
        reports: list[_Report] = []

        def digest_of_all() -> bytes:
            variables = list(self._variables() if callable(self._variables) else self._variables)
            reports.append(_Report(step, [variable_name(v) for v in variables], [digest(v) for v in variables]))
            # With the step, so that ranks at different steps do not pass for equal.
            return xxhash.xxh3_128_digest(step.to_bytes(8, "little") + b"".join(reports[0].digests))

        if len(set(gather(cluster.exchange(), "a divergence check", digest_of_all))) > 1:
            _raise_difference(gather(cluster.exchange(), "divergent variables", lambda: reports[0]), self._equal)
        self._equal = step


def check_first_update(model: Any, optimizer: Any, step: int) -> None:
    """Compare parameters and slots over ranks after the first update: an optimizer that does not average is found.

    Every rank calls it. It costs one digest of all values and an exchange of some 100 bytes a rank.

    Raises:
        CollectiveMismatchError: on every rank: they differ.
    """
    group = getattr(getattr(optimizer, "_hvdkit", None), "group", None)
    if group is None:  # ranks of a process set train a model of their own
        DivergenceDetector(replicated(model, optimizer), every=1).compare(step)


def replicated(model: Any, optimizer: Any) -> list[Any]:
    """Return the variables that every rank must hold alike: parameters, and the optimizer's slots and counters.

    The gradients that an optimizer adds up between two updates (``accumulate_steps``) are each rank's own, and so are
    shards, slots that ranks divide among them, and non-trainable weights such as moving statistics and the states of
    random generators.

    Args:
        model: a Keras model, or None.
        optimizer: a Keras optimizer, or None; it may still be without its slots.

    Example::

        DivergenceDetector(lambda: replicated(model, model.optimizer), every=500)
    """
    sums = {id(v) for part in _with_inner(optimizer) for v in getattr(part, "_accumulated_gradients", ())}
    slots = [] if optimizer is None else [v for v in optimizer.variables if id(v) not in sums]
    everything = [*(() if model is None else model.trainable_variables), *slots]
    return [v for v in everything if not is_part(v)]


def _with_inner(optimizer: Any) -> Iterator[Any]:
    """Yield ``optimizer`` and what a LossScaleOptimizer or MultiOptimizer holds."""
    yield optimizer
    for inner in (getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())):
        if inner is not None:
            yield from _with_inner(inner)


def _raise_difference(reports: list[_Report], equal_at: int | None) -> None:
    """Say which rank differs, and in which variable first."""
    compare(
        [report.step for report in reports],
        "divergence check: the step",
        "call check() after every step on every rank, with the number of steps done",
    )
    known = "they were not compared before" if equal_at is None else f"last known equal at step {equal_at}"
    compare(
        reports,
        "replicated variables",
        f"first known to differ at step {reports[0].step}, {known}; continue from a checkpoint of before, and look for "
        "what a rank does alone: values assigned, other learning rates, gradients not combined (use hk.fit, or wrap "
        "the optimizer: hk.DistributedOptimizer(optimizer)), faulty memory",
        key=lambda report: report.digests,
        show=_what_differs,
    )


def _what_differs(odd: _Report, usual: _Report) -> tuple[str, str]:
    places = unlike_places(odd.digests, usual.digests)
    names = max(odd.names, usual.names, key=len)
    got = f"other values in {len(places)} of {len(names)} variables, the first {names[places[0]]},"
    if len(odd.names) == len(usual.names):
        return got, "equal values"
    return f"{len(odd.names)} variables, and {got}", f"{len(usual.names)}"
