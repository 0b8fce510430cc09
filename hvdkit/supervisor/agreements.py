"""What the ranks of a session agree on a few times per second: the step, timed saves, and stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hvdkit import cluster
from hvdkit.cluster.agreement import gather
from hvdkit.cluster.logs import get_logger
from hvdkit.cluster.progress import progress
from hvdkit.supervisor.messages import SessionMessage, check_messages
from hvdkit.supervisor.pace import Pace
from hvdkit.supervisor.saved_state import to_float
from hvdkit.supervisor.saver import Saver
from hvdkit.supervisor.signals import StopSignals
from hvdkit.watchdog.reporter import reporter

# An agreement takes about 50 microseconds; mpirun gives ranks 1 s from SIGTERM to SIGKILL, including the save.
_AGREE_SECONDS = 0.25


class Agreements:
    """The agreements of one session.

    Args:
        saver: saves the state.
        begin_save: begins a save at the current step.
        save_model_secs: as for :class:`hvdkit.Supervisor`.
        stop_on_nonfinite: raise NonFiniteError for a loss that is NaN or infinite.

    Attributes:
        pace: says after which steps the ranks agree; the same on all ranks.
        wants_stop: whether this rank requests to stop.
        stopping: whether all ranks have agreed to stop.
        preempted_by: the signal because of which they have; None without one.
        loss: the last one that was passed to ``step``; None without one.
    """

    def __init__(
        self,
        saver: Saver,
        begin_save: Callable[[], object],
        *,
        save_model_secs: float | None,
        stop_on_nonfinite: bool,
    ) -> None:
        self._saver = saver
        self._begin_save = begin_save
        self._seconds = save_model_secs or math.inf
        self._stop_on_nonfinite = stop_on_nonfinite
        self.pace = Pace(min(_AGREE_SECONDS, self._seconds / 5))
        self._signals = StopSignals()
        self.wants_stop = False
        self.stopping = False
        self.preempted_by: str | None = None
        self.loss: object = None

    def begin(self) -> None:
        """Begin a session: from now on, signals are requests to stop."""
        self.wants_stop = False
        self.stopping = False
        self.preempted_by = None
        self._signals.__enter__()

    def end(self) -> None:
        """End the session."""
        self._signals.__exit__(None, None, None)

    def agree(self, step: int, *, saves: bool, last: bool = False) -> None:
        """Exchange messages between ranks and act on them at this step. Every rank calls it.

        Args:
            step: number of steps trained.
            saves: whether a save is due at this step, on all ranks.
            last: whether training is over.

        Raises:
            CheckpointError, CollectiveMismatchError, NonFiniteError: as for ``Supervisor.step``.
        """
        signal = self._signals.received
        messages = gather(
            cluster.exchange(),
            "Supervisor.step()",
            lambda: SessionMessage(
                step=step,
                stop=self.wants_stop,
                signal=None if signal is None else signal.name,
                loss=0.0 if self.loss is None else to_float("loss", self.loss),
                saving=self._saver.progress(),
                save_now=time.monotonic() - self._saver.when >= self._seconds,
                interval=self.pace.proposal(step),
            ),
        )
        if self.loss is not None:
            progress().flight.notes.at_loss(math.fsum(message.loss for message in messages) / len(messages))
        check_messages(messages, stop_on_nonfinite=self._stop_on_nonfinite)
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
        self.pace.settle(step, 1 if self._saver.busy else messages[0].interval)
