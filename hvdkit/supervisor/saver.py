"""The saves of one session: at most one under way, flushed summaries before each, old checkpoints removed after it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit import cluster
from hvdkit.checkpoint.folder import prune, step_name
from hvdkit.checkpoint.link import save_through_chief
from hvdkit.checkpoint.saving import Progress, agreed_state, begin, finish, of_chief, progress_of, settled
from hvdkit.checkpoint.writing import Save, Snapshot
from hvdkit.cluster.logs import get_logger
from hvdkit.cluster.progress import spending
from hvdkit.errors import NonFiniteError

# So long a session that ends by an error waits for a save that is under way.
GIVE_UP_SECONDS = 30.0


class Saver:
    """Saves a state into a folder of checkpoints. Every rank makes the same calls but for :meth:`progress`.

    Args:
        folder: where ``step-...`` folders go.
        state: gives what to save.
        max_to_keep, keep_every: as for :class:`hvdkit.Supervisor`.
        gather: the chief writes everything, and :meth:`begin` returns when that is done.
        asynchronous: the training goes on while a save is written.
        permitted: called on the chief before each checkpoint gets its name; raises if it must not.
        stop_on_nonfinite: raise NonFiniteError if weights or slots are NaN or infinite; else warn. Such a checkpoint
            is never kept.

    Attributes:
        step: the step of the last save that was begun, or None.
        when: its time, by the monotonic clock; at first that of construction.
        dropped: why the last save was dropped with no more than a warning (``stop_on_nonfinite=False``), or None.
    """

    def __init__(
        self,
        folder: Path,
        state: Callable[[], Mapping[str, Any]],
        *,
        max_to_keep: int | None,
        keep_every: int | None,
        gather: bool,
        asynchronous: bool,
        permitted: Callable[[], None],
        stop_on_nonfinite: bool,
    ):
        self.step: int | None = None
        self.dropped: NonFiniteError | None = None
        self.when = time.monotonic()
        self._folder, self._state, self._gather = folder, state, gather
        self._keep, self._asynchronous = (max_to_keep, keep_every), asynchronous
        self._permitted, self._stop_on_nonfinite = permitted, stop_on_nonfinite
        self._save: Save | None = None

    @property
    def busy(self) -> bool:
        """True while a save is under way; the same on all ranks between two agreements."""
        return self._save is not None

    def begin(self, step: int) -> Path:
        """Take the snapshot and begin to write it; first wait for the save before. Return the checkpoint's folder.

        Raises:
            CheckpointError: the save before failed on some rank, or this one, where the chief writes everything.
            NonFiniteError: the same, because weights or slots are not finite.
        """
        self.settle()
        self.dropped = None
        target = self._folder / step_name(step)
        checks = {"permitted": self._permitted, "committed": lambda: prune(target, *self._keep)}
        with spending("save"):
            flat = agreed_state(self._state())
            if self._gather:
                snapshot = Snapshot.of(flat, cluster.rank(), in_place=True)
                with self._nonfinite_noted():
                    save_through_chief(target, snapshot, step=step, **checks)
            else:
                token = of_chief("a save", lambda: secrets.token_hex(4))
                in_place = not self._asynchronous
                self._save = begin(target, flat, step=step, token=token, in_place=in_place, **checks)
        self.step, self.when = step, time.monotonic()
        return target

    def progress(self) -> Progress:
        """Return this rank's part for :meth:`hear`: how far it is with the save that is under way."""
        return Progress() if self._save is None else progress_of(self._save)

    def hear(self, ranks: Sequence[Progress]) -> None:
        """Note from every rank's progress whether the save is over.

        Raises:
            CheckpointError: on every rank: it failed on the one that is named.
            NonFiniteError: on every rank: weights or slots are not finite on the one that is named.
        """
        if self._save is not None:
            save, self._save = self._save, None
            with spending("save"), self._nonfinite_noted():
                self._save = None if settled(save, ranks) else save

    def settle(self) -> None:
        """Wait until the save that is under way is over. Raises as :meth:`hear` does."""
        if self._save is not None:
            save, self._save = self._save, None
            with spending("save"), self._nonfinite_noted():
                finish(save)

    @contextlib.contextmanager
    def _nonfinite_noted(self) -> Iterator[None]:
        """Turn NonFiniteError into a warning of the chief's if the user chose to go on."""
        try:
            yield
        except NonFiniteError as error:
            if self._stop_on_nonfinite:
                raise
            self.dropped = error
            if cluster.is_chief():
                get_logger().warning("%s (stop_on_nonfinite=False: training goes on)", error)

    def abandon(self) -> None:
        """Give this rank's part of a save that is under way some time to end; other ranks are not asked."""
        if self._save is not None:
            self._save.wait(GIVE_UP_SECONDS)
