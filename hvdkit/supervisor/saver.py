"""Save checkpoints of a session, one at a time, and remove old ones after each save."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvdkit import cluster
from hvdkit.checkpoint.chief_io import SaveThroughChief
from hvdkit.checkpoint.files import RunPath
from hvdkit.checkpoint.folder import prune
from hvdkit.checkpoint.manifest import step_name
from hvdkit.checkpoint.rank_checks import agreed_state
from hvdkit.checkpoint.saving import SaveProgress, all_ranks_done, finish, progress_of, take_snapshot
from hvdkit.checkpoint.writing import Save
from hvdkit.cluster.logs import get_logger
from hvdkit.cluster.progress import progress, spending
from hvdkit.errors import NonFiniteError, printable
from hvdkit.watchdog.reporter import reporter

# Seconds that a session ended by an error waits for a save in progress.
GIVE_UP_SECONDS = 30.0
# Largest share of the time to spend on saves at the end of epochs.
_SAVING_SHARE = 0.1


class Saver:
    """Saves states to a folder of checkpoints. Every rank must make the same calls, except :meth:`progress`.

    Args:
        folder: the parent of the ``step-...`` folders.
        state: returns the state to save.
        keep: ``max_to_keep`` and ``keep_every`` of :class:`hvdkit.Supervisor`.
        gather: the chief writes everything, and :meth:`begin` blocks until that is done.
        asynchronous: training continues while a save is written.
        permitted: called on the chief before a checkpoint is renamed to its final name; raises to prevent it.
        stop_on_nonfinite: raise NonFiniteError if weights or slots are NaN or infinite; otherwise warn. Such a
            checkpoint is never kept.

    Attributes:
        asynchronous, stop_on_nonfinite: as passed.
        step: the step of the last save that was started, or None.
        when: its monotonic time; initially that of construction.
        seconds: how long the last save took, or its call until it is complete; 0 before the first.
        dropped: the error for which the last save was dropped with only a warning (``stop_on_nonfinite=False``), or
            None.
        newest: the newest checkpoint; before the first save of a new run the folder of all, if it is local and exists.
    """

    def __init__(
        self,
        folder: RunPath,
        state: Callable[[], Mapping[str, object]],
        *,
        keep: tuple[int | None, int | None],
        gather: bool,
        asynchronous: bool,
        permitted: Callable[[], None],
        stop_on_nonfinite: bool,
    ):
        self.asynchronous = asynchronous
        self.step: int | None = None
        self.dropped: NonFiniteError | None = None
        self.when = time.monotonic()
        self.seconds = 0.0
        self._began = 0.0
        self._folder = folder
        self._state = state
        self._gather = gather
        self._keep = keep
        self._good: set[str] = set()  # names of checkpoints, for retention
        self._permitted = permitted
        self.stop_on_nonfinite = stop_on_nonfinite
        self._save: Save | None = None
        self.newest: RunPath | None = None

    def start(self, restored: RunPath | None, step: int) -> None:
        """Begin a session that has restored the checkpoint of ``step``, or none."""
        self._note_saved(step if restored else None)
        self.step = step if restored else None
        self.when = time.monotonic()
        self.newest = restored or (self._folder if isinstance(self._folder, Path) and self._folder.exists() else None)

    @property
    def busy(self) -> bool:
        """Whether a save is in progress; the same on all ranks between agreements."""
        return self._save is not None

    def is_affordable(self) -> bool:
        """Return whether saving now leaves saves a small share of the time."""
        return self.seconds <= _SAVING_SHARE * (time.monotonic() - self.when)

    def begin(self, step: int) -> RunPath:
        """Wait for the previous save, take a snapshot and start writing it. Return the checkpoint's folder.

        Raises as :meth:`update` does: for the previous save or, with ``gather``, for this one.
        """
        self.wait()
        self.dropped = None
        self._began = time.monotonic()
        target = self._folder / step_name(step)
        self._report_loss()
        with spending("save"):
            snapshot, token = take_snapshot(
                "a save",
                agreed_state(self._state()),
                lambda: secrets.token_hex(4),
                in_place=self._gather or not self.asynchronous,
            )
            save_class = SaveThroughChief if self._gather else Save
            self._save = save_class(
                target,
                snapshot,
                step=step,
                rank=cluster.rank(),
                size=cluster.size(),
                token=token,
                before_commit=self._permitted,
                after_commit=lambda: self._committed(target, step),
                background=self.asynchronous and not self._gather,
            ).start()
        if self._gather:
            self.wait()
        self.step = step
        self.when = time.monotonic()
        self.seconds = self.when - self._began
        return target

    def _committed(self, target: RunPath, step: int) -> None:
        """On the chief, once a checkpoint is complete: a rank may fail before the ranks agree that it is."""
        self._note_saved(step)
        prune(target, *self._keep, self._good)

    def _note_saved(self, step: int | None) -> None:
        """Note the step of the newest checkpoint for the job's last line."""
        reporter().note_saved(str(self._folder.parent), step)

    def _report_loss(self) -> None:
        """Warn on the chief if the newest local checkpoint has disappeared during the session."""
        if cluster.is_chief() and isinstance(self.newest, Path) and not os.path.lexists(self.newest):
            get_logger().warning(
                "%s has disappeared: something removed, renamed or unmounted it during this run. Earlier checkpoints "
                "may be lost; the run continues, and saves in %s",
                printable(self.newest),
                printable(self._folder),
            )

    def progress(self) -> SaveProgress:
        """Return this rank's progress with the current save, for :meth:`update`."""
        return SaveProgress() if self._save is None else progress_of(self._save)

    def update(self, ranks: Sequence[SaveProgress] | None) -> None:
        """Determine from the progress of all ranks whether the save is complete; without it, wait for its end.

        Raises:
            CheckpointError: the save failed on the rank that is named; raised on every rank.
            NonFiniteError: weights or slots are not finite on the rank that is named; raised on every rank.
        """
        save = self._save
        if save is None:
            return
        self._save = None  # also if it fails
        try:
            with spending("save"):
                if ranks is None:
                    finish(save)
                elif not all_ranks_done(save, ranks):
                    self._save = save
                    return
            self.newest = save.target
        except NonFiniteError as error:
            if self.stop_on_nonfinite:
                raise
            self.dropped = error
            if cluster.is_chief():
                get_logger().warning("%s (stop_on_nonfinite=False: training continues)", error)
        self.seconds = time.monotonic() - self._began
        if self.dropped is None:
            progress().flight.notes.saved(save.step, self.seconds)
            self._note_saved(save.step)

    def wait(self) -> None:
        """Wait for the current save to complete. Raises as :meth:`update` does."""
        self.update(None)

    def abandon(self) -> None:
        """Wait a limited time for this rank's part of the current save. Not collective."""
        if self._save is not None:
            self._save.wait(GIVE_UP_SECONDS)
