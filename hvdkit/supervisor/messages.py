"""Messages that ranks exchange when they agree, and their comparison: all ranks raise the same error, or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hvdkit import cluster
from hvdkit.checkpoint.saving import SaveProgress
from hvdkit.cluster.agreement import agree, compare, gather
from hvdkit.errors import NonFiniteError, describe


class SessionMessage(NamedTuple):
    """The message of one rank at an agreement. The last two attributes only matter on the chief.

    Attributes:
        step: number of steps trained.
        stop: whether a stop was requested on this rank.
        signal: the signal that requested it, or None.
        loss: the last loss; 0 without a loss.
        saving: progress of the current save.
        save_now: whether a timed save is due.
        interval: steps until the next agreement.
    """

    step: int
    stop: bool
    signal: str | None
    loss: float
    saving: SaveProgress
    save_now: bool
    interval: int


def check_messages(messages: Sequence[SessionMessage], *, stop_on_nonfinite: bool) -> None:
    """Check that all ranks are at the same step and their losses are finite.

    Raises:
        CollectiveMismatchError: a rank is at another step; the message names it.
        NonFiniteError: a loss is NaN or infinite; the message names rank and step.
    """
    compare(
        [each.step for each in messages],
        "Supervisor: the step",
        "call sv.step() the same number of times on every rank",
    )
    for rank, message in enumerate(messages):
        if stop_on_nonfinite and not math.isfinite(message.loss):
            got = f"{message.loss} at step {message.step} on rank {rank}"
            remedy = "lower the learning rate or clip; the last checkpoint is from before"
            raise NonFiniteError(describe("loss", got, "a finite number", remedy))


def agree_on_arguments(options: Mapping[str, object], data: object) -> None:
    """Compare the options passed on all ranks, and the data if they have a fingerprint. Every rank must call it.

    Raises:
        CollectiveMismatchError: options or data differ; the message names the lowest such rank and the option or part
            of the data.
    """
    fingerprint: Callable[[], Mapping[str, object]] = getattr(data, "fingerprint", dict)
    ranks = gather(cluster.exchange(), "Supervisor(...)", lambda: (dict(options), fingerprint()))
    for name in options:
        values = [rank_options[name] for rank_options, _ in ranks]
        compare(values, f"Supervisor: {name}", "pass the same arguments on every rank")
    remedy = "pass GlobalBatches the whole data set, the same on every rank: it takes each rank's rows itself"
    compare([rank_fingerprint for _, rank_fingerprint in ranks], "data", remedy, show=_differing_data)


def _differing_data(odd: Mapping[str, object], usual: Mapping[str, object]) -> tuple[str, str]:
    names = [name for name in {**usual, **odd} if odd.get(name) != usual.get(name)]
    return f"other {', '.join(names)}", "the same data"


def agree_on_scalars(scalars: Callable[[], dict[str, float]]) -> list[dict[str, float]]:
    """Return the scalars of all ranks. Every rank must call it.

    Raises:
        CollectiveMismatchError: names differ on a rank, or a value is not a number; the message names the rank.
    """
    what = "Supervisor.step: the scalars"
    remedy = "pass the same scalars on every rank"
    return agree(cluster.exchange(), scalars, what, remedy, key=sorted, show=_show_names)


def _show_names(odd: Mapping[str, float], usual: Mapping[str, float]) -> tuple[str, str]:
    return str(sorted(odd)), str(sorted(usual))
