"""What ranks tell each other when they agree, and the comparison of it: every rank raises the same error, or none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvdkit import cluster
from hvdkit.checkpoint.saving import Progress
from hvdkit.errors import CollectiveMismatchError, NonFiniteError, describe


class Word(NamedTuple):
    """What a rank says when the ranks agree. The last two count on the chief alone.

    Attributes:
        step: steps it has trained.
        stop: it was asked to stop.
        signal: the signal that told it to, or None.
        loss: its last loss; 0 where there is none.
        saving: how far it is with the save under way.
        save_now: a save is due by the clock.
        interval: steps until the next agreement.
    """

    step: int
    stop: bool
    signal: str | None
    loss: float
    saving: Progress
    save_now: bool
    interval: int


def compare(words: Sequence[Any], step: int, *, stop_on_nonfinite: bool) -> None:
    """Look whether all ranks are at one step, and their losses finite.

    Raises:
        CollectiveMismatchError: a rank is at another step, or in another exchange; it is named.
        NonFiniteError: a loss is NaN or infinite; rank and step are named.
    """
    for rank, word in enumerate(words):
        if not isinstance(word, Word) or word.step != step:
            raise CollectiveMismatchError(
                f"Supervisor: rank {rank} is elsewhere ({word}) while rank {cluster.rank()} agrees on step {step}; "
                "call sv.step() as often on every rank"
            )
        if stop_on_nonfinite and not math.isfinite(word.loss):
            got = f"{word.loss} at step {step} on rank {rank}"
            remedy = "lower the learning rate or clip; the last checkpoint is from before"
            raise NonFiniteError(describe("loss", got, "a finite number", remedy))


def compare_options(options: Mapping[str, Any]) -> None:
    """Look whether all ranks were given the same options. Every rank calls it.

    Raises:
        CollectiveMismatchError: it names the first rank and option that differ from rank 0.
    """
    everywhere = cluster.exchange().allgather(dict(options))
    for rank, theirs in enumerate(everywhere):
        for name, value in theirs.items():
            if value != everywhere[0][name]:
                raise CollectiveMismatchError(
                    f"Supervisor: {name} is {value!r} on rank {rank}, {everywhere[0][name]!r} on rank 0; give the same "
                    "arguments on every rank"
                )


def _shown(scalars: Any) -> str:
    return str(sorted(scalars)) if isinstance(scalars, Mapping) else "none"


def compare_names(scalars: Sequence[Mapping[str, float]]) -> None:
    """Look whether all ranks gave scalars of the same names.

    Raises:
        CollectiveMismatchError: they did not; it names the first rank that differs from rank 0.
    """
    for rank, theirs in enumerate(scalars):
        if not all(isinstance(each, Mapping) for each in (theirs, scalars[0])) or theirs.keys() != scalars[0].keys():
            raise CollectiveMismatchError(
                f"Supervisor.step: rank {rank} gave {_shown(theirs)}, rank 0 {_shown(scalars[0])}; give the same "
                "scalars on every rank"
            )
