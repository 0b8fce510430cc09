"""Files that are added while a run goes on: which of them each epoch reads."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hvdkit import cluster
from hvdkit.cluster import agreement
from hvdkit.data.files.source import FileSource
from hvdkit.errors import DataError, describe, integer

Growth = Literal["append", "replace"]


@dataclass(frozen=True)
class GrowingFiles:
    """The files of the present epoch, and of those after it until files are added.

    Attributes:
        growth: "append": new files are read in addition to the present ones. "replace": instead of them.
        listed: All files as they were last listed.
        source: Those of the present epoch.
        earlier: The names of the files that were replaced.
        first_epoch: The first epoch that reads ``source``.
        first_step: The number of batches before it, since the start of training.
        begun: Set when a batch of ``source`` is read, by any iterator over it.
    """

    growth: Growth
    listed: FileSource
    source: FileSource
    earlier: tuple[str, ...] = ()
    first_epoch: int = 0
    first_step: int = 0
    begun: threading.Event = field(default_factory=threading.Event, compare=False)

    @property
    def end(self) -> int | None:
        """The number of epochs that have files; None for no limit."""
        return self.first_epoch + 1 if self.growth == "replace" else None

    @property
    def state(self) -> dict[str, object]:
        """What a saved state has: JSON-compatible."""
        return {
            "growth": self.growth,
            "file_names": self.source.names,
            "earlier_files": [*self.earlier],
            "first_epoch": self.first_epoch,
            "first_step": self.first_step,
        }

    def restored(self, state: Mapping[str, object]) -> GrowingFiles:
        """Return the files of a saved state. Other files that are listed count as new."""
        if missing := set(self.state) - set(state):
            got = f"no {sorted(missing)}"
            remedy = "pass growth= to both runs, or to neither"
            raise ValueError(describe("state", got, "the state of files that grow", remedy))
        names = list(_names(state, "file_names"))
        earlier = tuple(_names(state, "earlier_files"))
        first_epoch = integer("state['first_epoch']", state["first_epoch"], minimum=0)
        first_step = integer("state['first_step']", state["first_step"], minimum=0)
        source = self.source
        if names != source.names:
            if missing := set(names) - set(self.listed.names):
                remedy = "bring them back, or start over"
                got = _some(sorted(missing))
                raise ValueError(describe("state['file_names']", got, "files that are listed now", remedy))
            source = self.listed.selected(names)
        return GrowingFiles(self.growth, self.listed, source, earlier, first_epoch, first_step)

    def grown(self, epoch: int, step: int, min_rows: int) -> GrowingFiles | None:
        """Return the files of ``epoch`` if there are new ones, otherwise None. A collective.

        Args:
            epoch: The epoch that is the first to read them.
            step: The number of batches before it.
            min_rows: New files that replace others are left for a later call if they have fewer rows.
        """
        replaces = self.growth == "replace" and (epoch > self.first_epoch or self.begun.is_set())
        if cluster.is_initialized():
            remedy = "call add_new_files at the end of the same epoch on every rank"
            agreement.agree(cluster.exchange(), lambda: (epoch, step, replaces), "epoch and step of new files", remedy)
        listed = self.listed.listed_again()
        known = {*self.source.names, *self.earlier}
        new = [name for name in listed.names if name not in known]
        if not new:
            return None
        if replaces:
            if sum(listed.rows_of(name) for name in new) < min_rows:
                return None
            names = new
            earlier = (*self.earlier, *self.source.names)
        else:
            names = [*self.source.names, *new]
            earlier = self.earlier
            if changed := [name for name in self.source.names if not self.source.is_same(listed, name)]:
                raise DataError(f"{_some(changed)} changed or disappeared since the epoch that read them began")
        return GrowingFiles(self.growth, listed, listed.selected(names), earlier, epoch, step)


def _names(state: Mapping[str, object], key: str) -> Sequence[str]:
    names = state[key]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(describe(f"state[{key!r}]", names, "a list of names", "pass the state unchanged"))
    return names


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more files"
