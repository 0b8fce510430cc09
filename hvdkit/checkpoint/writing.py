"""One save: a snapshot of this rank's part, and the thread that brings it to the disk.

The ranks' threads exchange nothing over the network, where the training may be in the middle of a collective. Each
writes its file and then a small report beside it; the chief's thread waits for all reports and makes it whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdkit.checkpoint.entries import Entry, State
from hvdkit.checkpoint.files import naming_file, remove_folder, write_text
from hvdkit.checkpoint.folder import commit, writing_name
from hvdkit.checkpoint.manifest import RANK_VALUES, REPLICATED, Manifest, Part, Saved, shard_name
from hvdkit.checkpoint.tensorfile import FileRecord, NonFiniteTensor, Outgoing, write_file
from hvdkit.errors import CheckpointError, HvdkitError, NonFiniteError

_FIRST_NAP, _LONGEST_NAP = 0.002, 0.01  # seconds
_NICER = 10  # by which a save that nobody waits for gives way to the training where cores are short


@dataclass
class Snapshot:
    """What one rank puts into a checkpoint, as it was at one step.

    Attributes:
        entries: the state's tensors, in order, with this rank's part of each; those of a replicated one on the chief
            alone.
        values: plain values, the same on all ranks.
        rank_values: plain values of this rank's own.
    """

    entries: list[tuple[Entry, Outgoing | None]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    rank_values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state: State, rank: int, *, in_place: bool = False) -> Snapshot:
        """Take the state as it is now; ``in_place`` where nothing changes it until it is written.

        On CPUs this copies nothing: TensorFlow keeps a variable's memory for as long as somebody holds what
        was read of it, and gives the variable new memory at its next update. So the most that a snapshot ever costs is
        one copy of what is updated while it is written. Of variables that are updated by rows TensorFlow makes that
        copy at once; in place, they are read some rows at a time.
        """

        def take(entry: Entry) -> Outgoing | None:
            if (entry.kind == "replicated" and rank != 0) or not entry.writes:
                return None
            if in_place and entry.rows is not None:
                assert entry.index is not None
                shape = tuple(len(axis) for axis in entry.index)
                return Outgoing(entry.name, entry.dtype, shape, entry.rows, entry.allowed)
            return Outgoing.of(entry.name, entry.read(), entry.allowed)

        entries = [(entry, take(entry)) for entry in state.entries.values()]
        values = {name: v.read() for name, v in state.values.items() if not v.per_rank}
        return cls(entries, values, {name: v.read() for name, v in state.values.items() if v.per_rank})

    def replicated(self) -> list[Outgoing]:
        """Return what goes into the chief's file of replicated tensors."""
        return [tensor for e, tensor in self.entries if e.kind == "replicated" and tensor is not None]

    def own(self) -> list[Outgoing]:
        """Return what goes into this rank's file; tensors without elements are left out."""
        return [
            tensor
            for e, tensor in self.entries
            if e.kind != "replicated" and tensor is not None and (0 not in tensor.shape or e.kind == "per_rank")
        ]

    def metadata(self) -> dict[str, str]:
        """Return this rank's own values as they go into the metadata of its file."""
        return {RANK_VALUES: json.dumps(self.rank_values)} if self.rank_values else {}

    def indices(self) -> dict[str, Any]:
        """Return which part of each sharded tensor this rank has, fit for JSON."""
        return {e.name: [(i.start, i.stop, i.step) for i in e.index] for e, _ in self.entries if e.index is not None}


class Failure(NamedTuple):
    """Why a save failed on one rank, in a form that ranks can exchange.

    Attributes:
        words: the error's text.
        non_finite: a tensor held NaN or an infinity.
        given_up: the rank only stopped writing because another rank had failed.
    """

    words: str
    non_finite: bool = False
    given_up: bool = False


class GivenUpError(CheckpointError):
    """This rank stopped writing because another rank had failed."""


class Save:
    """A save that is under way on this rank.

    Args:
        target: the checkpoint's folder.
        snapshot: this rank's part.
        step: steps trained.
        rank, size: this rank, and how many save.
        token: makes the temporary name; the same on every rank, another for every save.
        permitted: called on the chief before the checkpoint gets its name; raises if it must not.
        committed: called on the chief once the checkpoint is whole.
        behind: the training goes on meanwhile.

    Attributes:
        target, step, rank: as given.
        error: what went wrong on this rank, or None.
    """

    def __init__(
        self,
        target: Path,
        snapshot: Snapshot,
        *,
        step: int,
        rank: int,
        size: int,
        token: str,
        permitted: Callable[[], None] = lambda: None,
        committed: Callable[[], None] = lambda: None,
        behind: bool = False,
    ):
        self.target, self.step, self.rank = target, step, rank
        self.error: Exception | None = None
        self._snapshot: Snapshot | None = snapshot
        self._size = size
        self._folder = writing_name(target, token)
        self._permitted, self._committed, self._behind = permitted, committed, behind
        self._cancelled = threading.Event()
        # A daemon: a job that ends by an error does not wait for reports that will never come.
        self._thread = threading.Thread(target=self._run, name="hvdkit-save", daemon=True)

    def start(self) -> Save:
        """Begin to write, and return at once."""
        self._thread.start()
        return self

    @property
    def done(self) -> bool:
        """True when this rank has nothing left to do: its files are on the disk, or it failed."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for :attr:`done`, and return it."""
        self._thread.join(seconds)
        return self.done

    def cancel(self) -> None:
        """Give up, because another rank failed. What was written is removed."""
        self._cancelled.set()

    def clean_up(self) -> None:
        """Remove what a failed save has left; on the chief, when all ranks are done."""
        if self.rank == 0:
            remove_folder(self._folder)

    def failure(self) -> Failure | None:
        """Return what went wrong on this rank, for the other ranks."""
        if self.error is None:
            return None
        words = str(self.error) if isinstance(self.error, HvdkitError) else f"{type(self.error).__name__}: {self.error}"
        return Failure(words, isinstance(self.error, NonFiniteTensor), isinstance(self.error, GivenUpError))

    def _run(self) -> None:
        if self._behind:
            with contextlib.suppress(OSError):  # a system that will not have it
                os.nice(_NICER)  # on Linux this thread's alone: nice(2), "C library/kernel differences"
        try:
            report = self._write_own()
            if self.rank == 0:
                self._make_whole(report)
        except Exception as error:  # kept for the training's thread, which raises it on all ranks
            # The folder stays until all ranks are done: one that still writes there must not fail because it went.
            self.error = error
        finally:
            self._snapshot = None  # its memory is the variables' again

    def _write_own(self) -> dict[str, Any]:
        """Write this rank's file and its report."""
        snapshot = self._snapshot
        assert snapshot is not None
        with naming_file(self._folder, "written"):
            self._folder.mkdir(parents=True, exist_ok=True)
        own, files, name = snapshot.own(), {}, shard_name(self.rank, self._size)
        if own or snapshot.rank_values:
            files[name] = write_file(self._folder / name, own, metadata=snapshot.metadata())
        report = {"files": files, "indices": snapshot.indices()}
        if self.rank != 0:
            # With the last report the chief gives the folder its name, which may be before this returns.
            write_text(self._report(self.rank), json.dumps(report), sync=False)
        return report

    def _make_whole(self, own: dict[str, Any]) -> None:
        """Write what is the chief's, wait for the others' reports, and give the checkpoint its name."""
        snapshot = self._snapshot
        assert snapshot is not None
        replicated = snapshot.replicated()
        files = {REPLICATED: write_file(self._folder / REPLICATED, replicated)} if replicated else {}
        reports = [own, *(self._wait_for(rank) for rank in range(1, self._size))]
        manifest = assemble(snapshot, reports, files, step=self.step)
        manifest.write(self._folder)
        for rank in range(1, self._size):
            self._report(rank).unlink()
        self._check_cancelled()
        self._permitted()
        commit(self._folder, self.target)
        self._committed()

    def _report(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"

    def _wait_for(self, rank: int) -> dict[str, Any]:
        nap = _FIRST_NAP
        while not self._report(rank).exists():
            self._check_cancelled()
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        with naming_file(self._report(rank), "read"):
            report = json.loads(self._report(rank).read_bytes())
        report["files"] = {name: FileRecord(*record) for name, record in report["files"].items()}
        return report

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise GivenUpError(f"{self.target}: another rank could not write its part")


def non_finite(words: str, rank: int, step: int, newest: str | None) -> NonFiniteError:
    """Return the error for a save that found NaN or an infinity.

    Args:
        words: of :class:`NonFiniteTensor`: tensor, value and rows.
        rank: which one holds it.
        step: steps trained.
        newest: name of the checkpoint that a restart would use, or None.
    """
    restart = f"would continue from {newest}" if newest else "would begin from the initial values"
    return NonFiniteError(
        f"{words}, on rank {rank} at step {step}; this checkpoint is not saved, and a restart {restart}: lower the "
        "learning rate, or clip gradients"
    )


def assemble(snapshot: Snapshot, reports: list[dict[str, Any]], files: dict[str, FileRecord], *, step: int) -> Manifest:
    """Return the manifest of what all ranks have written.

    Args:
        snapshot: the chief's.
        reports: of each rank: its files' records, its indices of sharded tensors.
        files: records of the chief's files of replicated tensors.
        step: steps trained.
    """
    manifest = Manifest(step=step, size=len(reports), values=snapshot.values)
    manifest.files = dict(files)
    for report in reports:
        manifest.files |= report["files"]
    manifest.rank_values = list(snapshot.rank_values)
    for entry, _ in snapshot.entries:
        if entry.kind == "replicated":
            parts = [Part(REPLICATED, files[REPLICATED].tensors[entry.name])]
        else:
            parts = [
                Part(name, record.tensors[entry.name], _index(entry, report))
                for report in reports
                for name, record in report["files"].items()
                if entry.name in record.tensors
            ]
        manifest.variables[entry.name] = Saved(entry.kind, entry.shape, entry.dtype.name, tuple(parts), entry.partition)
    return manifest


def _index(entry: Entry, report: dict[str, Any]) -> tuple[tuple[int, int, int], ...] | None:
    if entry.index is None:
        return None
    return tuple(tuple(axis) for axis in report["indices"][entry.name])
