"""What the ranks of a session agree on: arguments, scalars, and a few times per second the step, saves and stopping.

All ranks evaluate the same messages, so they all raise the same error, or none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hvdkit import cluster
from hvdkit.checkpoint.saving import SaveProgress
from hvdkit.cluster.agreement import agree, compare, gather
from hvdkit.cluster.logs import get_logger
from hvdkit.cluster.progress import progress
from hvdkit.errors import NonFiniteError, describe
from hvdkit.supervisor.pace import Pace, crosses
from hvdkit.supervisor.saved_state import to_float
from hvdkit.supervisor.saver import Saver
from hvdkit.supervisor.signals import StopSignals
from hvdkit.supervisor.summaries import numbers_in
from hvdkit.watchdog.reporter import reporter

# An agreement takes about 50 microseconds; mpirun gives ranks 1 s from SIGTERM to SIGKILL, including the save.
_AGREE_SECONDS = 0.25


class _Message(NamedTuple):
    """The message of one rank at an agreement. The last two attributes only matter on the chief."""

    step: int
    stop: bool
    signal: str | None
    loss: float  # 0 without a loss
    saving: SaveProgress
    save_now: bool  # a timed save is due
    interval: int  # steps until the next agreement


class Agreements:
    """The agreements of one session.

    Args:
        saver: saves the state.
        begin_save: begins a save at the current step.
        save_steps, save_model_secs: as for :class:`hvdkit.Supervisor`.

    Attributes:
        wants_stop: whether this rank requests to stop.
        stopping: whether all ranks have agreed to stop.
        preempted_by: the signal because of which they have; None without one.
    """

    def __init__(
        self,
        saver: Saver,
        begin_save: Callable[[], object],
        *,
        save_steps: int | None,
        save_model_secs: float | None,
    ) -> None:
        self._saver = saver
        self._begin_save = begin_save
        self._save_steps = save_steps
        self._seconds = save_model_secs or math.inf
        self._pace = Pace(min(_AGREE_SECONDS, self._seconds / 5))
        self._signals = StopSignals()
        self.wants_stop = False
        self.stopping = False
        self.preempted_by: str | None = None
        self._loss: object = None

    def begin(self) -> None:
        """Begin a session: from now on, signals are requests to stop."""
        self.wants_stop = False
        self.stopping = False
        self.preempted_by = None
        self._signals.__enter__()

    def end(self) -> None:
        """End the session."""
        self._signals.__exit__(None, None, None)

    def end_step(self, before: int, now: int, loss: object) -> None:
        """After steps ``before`` to ``now``, agree if that is due. Every rank calls it; see :meth:`agree`."""
        self._loss = loss
        saves = crosses(self._save_steps, before, now)
        if saves or now >= self._pace.next_step:
            self.agree(now, saves=saves)

    def agree(self, step: int, *, saves: bool, last: bool = False) -> None:
        """Exchange messages between ranks and act on them at this step. Every rank calls it.

        Args:
            step: number of steps trained.
            saves: whether a save is due at this step, on all ranks.
            last: whether training is over.
        """
        signal = self._signals.received
        messages = gather(
            cluster.exchange(),
            "Supervisor.step()",
            lambda: _Message(
                step=step,
                stop=self.wants_stop,
                signal=None if signal is None else signal.name,
                loss=0.0 if self._loss is None else to_float("loss", self._loss),
                saving=self._saver.progress(),
                save_now=time.monotonic() - self._saver.when >= self._seconds,
                interval=self._pace.proposal(step),
            ),
        )
        if self._loss is not None:
            progress().flight.notes.at_loss(math.fsum(message.loss for message in messages) / len(messages))
        self._check(messages)
        self._saver.update([message.saving for message in messages])
        self.stopping = self.stopping or any(message.stop or message.signal for message in messages)
        received = next((message.signal for message in messages if message.signal), None)
        if received and not last:
            self.preempted_by = received
            self._begin_save()
            self._saver.wait()
            saved = reporter().saved
            if cluster.is_chief() and saved is not None:
                get_logger().warning("%s: %s", received, saved.text)
        elif saves or (messages[0].save_now and not self._saver.busy):
            self._begin_save()
        if last or not self._saver.asynchronous:
            self._saver.wait()
        # During a save, agree at every step, to detect its failure early.
        self._pace.settle(step, 1 if self._saver.busy else messages[0].interval)

    def _check(self, messages: Sequence[_Message]) -> None:
        """Check that all ranks are at the same step and their losses are finite."""
        remedy = "call sv.step() the same number of times on every rank"
        compare([each.step for each in messages], "Supervisor: the step", remedy)
        for rank, message in enumerate(messages):
            if self._saver.stop_on_nonfinite and not math.isfinite(message.loss):
                got = f"{message.loss} at step {message.step} on rank {rank}"
                remedy = "lower the learning rate or clip; the last checkpoint is from before"
                raise NonFiniteError(describe("loss", got, "a finite number", remedy))


def agree_on_arguments(options: Mapping[str, object], data: object) -> None:
    """Compare the options passed on all ranks, and the data if they have a fingerprint. Every rank must call it."""
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


def means_over_ranks(scalars: Mapping[str, object], *, are_logs: bool) -> dict[str, float]:
    """Return the means of the scalars that are passed to ``step``, or of the numbers in Keras's logs."""

    def numbers() -> dict[str, float]:
        return numbers_in(scalars) if are_logs else {name: to_float(name, value) for name, value in scalars.items()}

    ranks = agree(
        cluster.exchange(),
        numbers,
        "Supervisor.step: the scalars",
        "pass the same scalars on every rank",
        key=sorted,
        show=lambda odd, usual: (str(sorted(odd)), str(sorted(usual))),
    )
    return {name: math.fsum(values[name] for values in ranks) / len(ranks) for name in ranks[0]}
