"""The saves of one session: at most one under way, flushed summaries before each, old checkpoints removed after it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdkit import cluster
from hvdkit.checkpoint.folder import prune, step_name
from hvdkit.checkpoint.link import save_through_chief
from hvdkit.checkpoint.store import agreed_state, begin, finish, progress_of, settled
from hvdkit.checkpoint.writing import Save, Snapshot
from hvdkit.cluster.progress import spending

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

    Attributes:
        step: the step of the last save that was begun, or None.
        when: its time, by the monotonic clock; at first that of construction.
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
    ):
        self.step: int | None = None
        self.when = time.monotonic()
        self._folder, self._state, self._gather = folder, state, gather
        self._keep, self._asynchronous = (max_to_keep, keep_every), asynchronous
        self._save: Save | None = None

    @property
    def busy(self) -> bool:
        """True while a save is under way; the same on all ranks between two agreements."""
        return self._save is not None

    def begin(self, step: int) -> Path:
        """Take the snapshot and begin to write it; first wait for the save before. Return the checkpoint's folder.

        Raises:
            CheckpointError: the save before failed on some rank, or this one, where the chief writes everything.
        """
        self.settle()
        target = self._folder / step_name(step)
        with spending("save"):
            flat = agreed_state(self._state())
            if self._gather:
                snapshot = Snapshot.of(flat, cluster.rank(), in_place=True)
                save_through_chief(target, snapshot, step=step, committed=self._prune)
            else:
                token = cluster.exchange().broadcast(secrets.token_hex(4), 0)
                in_place = not self._asynchronous
                self._save = begin(target, flat, step=step, token=token, committed=self._prune, in_place=in_place)
        self.step, self.when = step, time.monotonic()
        return target

    def progress(self) -> tuple[bool, str | None]:
        """Return this rank's word about the save that is under way, for :meth:`hear`."""
        return (True, None) if self._save is None else progress_of(self._save)

    def hear(self, words: list[tuple[bool, str | None]]) -> None:
        """Note from every rank's word whether the save is over.

        Raises:
            CheckpointError: on every rank: it failed on the one that is named.
        """
        if self._save is not None:
            save = self._save
            try:
                with spending("save"):
                    over = settled(save, words)
            except BaseException:
                self._save = None
                raise
            self._save = None if over else save

    def settle(self) -> None:
        """Wait until the save that is under way is over. Raises as :meth:`hear` does."""
        if self._save is not None:
            save, self._save = self._save, None
            with spending("save"):
                finish(save)

    def abandon(self) -> None:
        """Give this rank's part of a save that is under way some time to end; other ranks are not asked."""
        if self._save is not None:
            self._save.wait(GIVE_UP_SECONDS)

    def _prune(self) -> None:
        prune(self._folder, *self._keep)
