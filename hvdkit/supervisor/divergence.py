"""Detect divergence: replicated parameters that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from hvdkit import cluster
from hvdkit.cluster.agreement import compare, differing_indices, gather, run_and_describe
from hvdkit.collectives.digests import digest
from hvdkit.errors import describe
from hvdkit.optimizer.inner_optimizers import slots_of
from hvdkit.sharding.shards import AnyVariable, differs_by_rank
from hvdkit.sharding.variables import variable_name

if TYPE_CHECKING:
    import keras


class _Report(NamedTuple):
    """The digests of one rank, exchanged if the combined digests differ."""

    step: int
    names: list[str]
    digests: list[bytes]

    def combined_digest(self) -> bytes:
        # Include the step, so that ranks at different steps do not compare equal.
        return xxhash.xxh3_128_digest(self.step.to_bytes(8, "little") + b"".join(self.digests))


class DivergenceDetector:
    """Compares variables bit for bit over all ranks every few steps.

    A comparison computes a digest of all values, about as fast as memory can be read, and exchanges some 100 bytes per
    rank. Steps between comparisons cost nothing.

    Only for replicated variables, which are equal because every rank makes the same updates. Moving statistics of
    BatchNormalization, which depend on each rank's examples, states of random generators, and locally accumulated
    gradients are not replicated; :func:`replicated` returns a model's variables without them.

    Args:
        variables: TensorFlow or Keras variables, the same list on every rank; or a function that returns them, for
            optimizers that create their slots later.
        every: steps between comparisons.
        first: also compare at the first call of :meth:`check`.

    Raises:
        ValueError: ``every`` is not an integer >= 1.

    Example::

        detector = DivergenceDetector(lambda: replicated(model, model.optimizer), every=500)
        for step, batch in enumerate(batches, start=1):
            train_step(batch)
            detector.check(step)
    """

    def __init__(
        self,
        variables: Iterable[AnyVariable] | Callable[[], Iterable[AnyVariable]],
        *,
        every: int,
        first: bool = False,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(describe("every", every, "a number of steps >= 1", "pass e.g. 500"))
        self.every = every
        self._variables = variables if callable(variables) else list(variables)
        self._checked = 0
        self._compares_next = first
        self._equal: int | None = None

    def check(self, step: int) -> None:
        """Compare the variables if a comparison is due. Every rank must call it after every step; steps may jump.

        Args:
            step: number of steps done, the same on every rank.

        Raises:
            CollectiveMismatchError: variables differ; raised on every rank. The message names the rank, the first
                variable, the step, and the last step at which all were equal.
        """
        if self._compares_next:
            self._compares_next = False
            self.compare(step)
        if step // self.every <= self._checked // self.every:
            return
        self._checked = step
        self.compare(step)

    def compare(self, step: int) -> None:
        """Compare the variables now. Raises as :meth:`check` does."""
        if cluster.size() == 1:
            return
        exchange = cluster.exchange()

        def report() -> _Report:
            variables = list(self._variables() if callable(self._variables) else self._variables)
            return _Report(step, [variable_name(v) for v in variables], [digest(v) for v in variables])

        own, combined = run_and_describe(exchange, "a divergence check", report, _Report.combined_digest)
        if len(set(combined)) > 1:
            _raise_difference(gather(exchange, "divergent variables", lambda: own), self._equal)
        self._equal = step


def check_first_update(model: keras.Model, optimizer: keras.optimizers.Optimizer, step: int) -> None:
    """Compare parameters and slots over ranks after the first update, to detect optimizers that do not average.

    Every rank must call it. It costs one digest of all values and an exchange of some 100 bytes per rank.
    """
    group = getattr(getattr(optimizer, "_hvdkit", None), "group", None)
    if group is None:  # each process set trains its own model
        DivergenceDetector(replicated(model, optimizer), every=1).compare(step)


def replicated(model: keras.Model | None, optimizer: keras.optimizers.Optimizer | None) -> list[AnyVariable]:
    """Return the variables that must be equal on every rank: parameters, and the optimizer's slots and counters.

    Excludes gradients accumulated between updates (``accumulate_steps``), shards, sharded slots, and non-trainable
    weights such as moving statistics and states of random generators.
    """
    slots = [] if optimizer is None else slots_of(optimizer)
    parameters = [] if model is None else model.trainable_variables
    return [v for v in [*parameters, *slots] if not differs_by_rank(v)]


def _raise_difference(reports: list[_Report], equal_at: int | None) -> None:
    """Raise an error that names the rank that differs and its first differing variable."""
    remedy = "call check() after every step on every rank, with the number of steps done"
    compare([report.step for report in reports], "divergence check: the step", remedy)
    history = "they were not compared before" if equal_at is None else f"last known equal at step {equal_at}"
    remedy = (
        f"first known to differ at step {reports[0].step}, {history}; continue from an earlier checkpoint, and look "
        "for what only one rank does: assigned values, a different learning rate, uncombined gradients (use hk.fit, or "
        "wrap the optimizer: hk.DistributedOptimizer(optimizer)), faulty memory"
    )
    compare(reports, "replicated variables", remedy, key=lambda report: report.digests, show=_what_differs)


def _what_differs(odd: _Report, usual: _Report) -> tuple[str, str]:
    indices = differing_indices(odd.digests, usual.digests)
    names = max(odd.names, usual.names, key=len)
    got = f"different values in {len(indices)} of {len(names)} variables, the first {names[indices[0]]},"
    if len(odd.names) == len(usual.names):
        return got, "equal values"
    return f"{len(odd.names)} variables, and {got}", f"{len(usual.names)}"
