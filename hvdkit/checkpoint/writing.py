"""One save: a snapshot of this rank's part, the files that are written, and the commit by the chief.

With :class:`Save` every rank writes its own part; ``SaveThroughChief`` of ``chief_io.py`` is for ranks that do not
share a file system. ``destination.py`` is where the files are written: a local folder, or a store.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from hvdkit.checkpoint import stores
from hvdkit.checkpoint.destination import LocalFolder, StoreFolder
from hvdkit.checkpoint.entries import State, StateTensor
from hvdkit.checkpoint.files import RunPath
from hvdkit.checkpoint.folder import latest
from hvdkit.checkpoint.manifest import RANK_VALUES, Manifest, replicated_name, shard_name
from hvdkit.checkpoint.schema import Schema, array, checked, json_of, mapping, plain, too_many_values, typed
from hvdkit.checkpoint.tensor_entry import Part, TensorEntry
from hvdkit.checkpoint.tensorfile import FileRecord, NonFiniteTensor, write_file
from hvdkit.errors import CheckpointError, NonFiniteError

Indices: TypeAlias = Mapping[str, tuple[tuple[int, int, int], ...]]
"""For each sharded tensor: start, stop and step along each axis of a rank's part."""
_NICENESS = 10  # niceness increment of a background save, so that training takes precedence if cores are scarce


class SaveReport(NamedTuple):
    """What one rank has written.

    Attributes:
        files: the records of its files, by name.
        indices: the index of its part of each sharded tensor.
    """

    files: dict[str, FileRecord]
    indices: Indices

    @classmethod
    def of(cls, files: dict[str, tuple[Any, ...]], indices: Mapping[str, Sequence[Sequence[int]]]) -> SaveReport:
        """Return the report that was written as JSON; the manifest made of it is checked as a whole."""
        index_of = {name: tuple(map(tuple, index)) for name, index in indices.items()}
        return cls({name: FileRecord(*record) for name, record in files.items()}, cast(Indices, index_of))


_REPORT: Schema[SaveReport] = typed(SaveReport.of, files=mapping(array(plain, exactly=3)), indices=mapping(plain))


@dataclass
class Snapshot:
    """One rank's contribution to a checkpoint at a given step.

    Attributes:
        tensors: the state's tensors, in order; those that this rank writes have the values of that step.
        values: plain values, the same on all ranks.
        rank_values: plain values specific to this rank.
    """

    tensors: list[StateTensor] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    rank_values: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, state: State, rank: int, *, in_place: bool = False) -> Snapshot:
        """Take a snapshot of the current state; ``in_place`` if it does not change until it is written.

        On CPUs this does not copy: TensorFlow keeps a variable's memory as long as a value read from it is referenced,
        and allocates new memory at the variable's next update. So a snapshot costs at most one copy of the variables
        updated while it is written. TensorFlow copies variables that are updated by rows immediately; with
        ``in_place`` they are read in blocks of rows instead.
        """

        def take(tensor: StateTensor) -> StateTensor:
            is_written = tensor.writes and (tensor.kind != "replicated" or rank == 0)
            return tensor.held() if is_written and (tensor.rows is None or not in_place) else tensor

        tensors = [take(tensor) for tensor in state.tensors.values()]
        values = {name: v.read() for name, v in state.values.items() if not v.per_rank}
        return cls(tensors, values, {name: v.read() for name, v in state.values.items() if v.per_rank})

    def manifest(self, step: int, size: int) -> Manifest:
        """Return the manifest of a save by ``size`` ranks, without its files and the parts of tensors."""
        variables = {t.name: TensorEntry(t.kind, t.shape, t.dtype.name, (), t.partition) for t in self.tensors}
        return Manifest(step, size, variables, self.values, list(self.rank_values))

    def shard_tensors(self) -> list[StateTensor]:
        """Return the tensors for this rank's shard file; tensors without elements are omitted."""
        sharded = [t for t in self.tensors if t.kind != "replicated" and t.writes]
        return [t for t in sharded if t.kind == "per_rank" or 0 not in t.part_shape]

    def metadata(self) -> dict[str, str]:
        """Return this rank's plain values as metadata for its shard file."""
        written = json.dumps(self.rank_values)
        if (problem := too_many_values(written)) is not None:
            raise CheckpointError(f"a rank's values cannot be saved: JSON that {problem}; save large values as arrays")
        return {RANK_VALUES: written} if self.rank_values else {}

    def indices(self) -> Indices:
        """Return the index of this rank's part of each sharded tensor, for JSON."""
        return {
            t.name: tuple((axis.start, axis.stop, axis.step) for axis in t.index)
            for t in self.tensors
            if t.index is not None
        }


class CancelledSaveError(CheckpointError):
    """This rank stopped writing because another rank had failed."""


class Save:
    """A save in progress on this rank, in a folder that all ranks share.

    Every rank writes its own file, and then a small report next to it that the chief waits for. Ranks exchange only
    files: training may be in the middle of a collective.

    Args:
        target: the checkpoint's folder.
        snapshot: this rank's part.
        step: steps trained.
        rank, size: this rank, and the number of ranks.
        token: part of the temporary name; the same on every rank, unique for every save.
        before_commit: called on the chief before the final rename; raises to prevent it.
        after_commit: called on the chief once the checkpoint is complete.
        background: training continues during the save.

    Attributes:
        target, step, rank, size: the arguments.
        destination: where the files are written.
        error: the error on this rank, or None.
    """

    def __init__(
        self,
        target: RunPath,
        snapshot: Snapshot,
        *,
        step: int,
        rank: int,
        size: int,
        token: str,
        before_commit: Callable[[], None] = lambda: None,
        after_commit: Callable[[], None] = lambda: None,
        background: bool = False,
    ):
        self.target = target
        self.step = step
        self.rank = rank
        self.size = size
        self.destination: LocalFolder | StoreFolder = (
            LocalFolder(target, token) if isinstance(target, Path) else StoreFolder(target, token)
        )
        self.error: Exception | None = None
        self._before_commit = before_commit
        self._after_commit = after_commit
        self._background = background
        self._cancelled = threading.Event()
        # A daemon thread: a job that exits with an error must not wait for reports that will never arrive.
        # Only the thread refers to the snapshot, so that its memory is released when the thread ends.
        self._thread = threading.Thread(target=self._run, args=[snapshot], name="hvdkit-save", daemon=True)

    def start(self) -> Save:
        """Start writing, and return immediately."""
        self._thread.start()
        return self

    @property
    def done(self) -> bool:
        """True if this rank has finished: its part is on disk, or it failed."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for :attr:`done`, and return it."""
        if not self.done:
            self._thread.join(seconds)
        return self.done

    def cancel(self) -> None:
        """Stop writing because another rank failed."""
        self._cancelled.set()

    def check_cancelled(self) -> None:
        """Raise CancelledSaveError if another rank failed."""
        if self._cancelled.is_set():
            raise CancelledSaveError(f"{self.target}: another rank could not write its part")

    def write_own(self, snapshot: Snapshot) -> SaveReport:
        """Write this rank's files: its shard and, on the chief, the replicated tensors."""
        self.destination.prepare()
        files: dict[str, FileRecord] = {}
        if self.rank == 0:
            name = replicated_name(self.destination.suffix)
            files |= self._write(name, [t for t in snapshot.tensors if t.kind == "replicated"], {}, 0)
        files |= self._write_shard(snapshot.shard_tensors(), snapshot.metadata(), self.rank)
        indices = snapshot.indices()
        snapshot.tensors = []  # frees the memory of the values, which are in files
        for name in files:
            self.destination.publish(name)
        return SaveReport(files, indices)

    def write_shard(self, tensors: list[StateTensor], metadata: dict[str, str], rank: int) -> dict[str, FileRecord]:
        """Write and publish the file with the tensors and plain values of ``rank``, if there are any."""
        files = self._write_shard(tensors, metadata, rank)
        for name in files:
            self.destination.publish(name)
        return files

    def _write_shard(self, tensors: list[StateTensor], metadata: dict[str, str], rank: int) -> dict[str, FileRecord]:
        return self._write(shard_name(rank, self.size, self.destination.suffix), tensors, metadata, rank)

    def _write(
        self, name: str, tensors: list[StateTensor], metadata: dict[str, str], rank: int
    ) -> dict[str, FileRecord]:
        """Write a file of ``rank`` unless it has no content; an error about non-finite values names the rank."""
        if not tensors and not metadata:
            return {}
        try:
            return {name: write_file(self.destination.folder / name, tensors, metadata=metadata)}
        except NonFiniteTensor as error:
            newest = latest(self.target.parent)
            restart = f"would continue from {newest.name}" if newest else "would start from the initial values"
            raise NonFiniteError(
                f"{error}, on rank {rank} at step {self.step}; this checkpoint is not saved, and a restart {restart}: "
                "lower the learning rate, or clip gradients"
            ) from None

    def _run(self, snapshot: Snapshot) -> None:
        if self._background:
            with contextlib.suppress(OSError):  # not permitted on this system
                os.nice(_NICENESS)  # on Linux only for this thread: nice(2), "C library/kernel differences"
        try:
            with stores.patiently(self.check_cancelled):
                self._write_part(snapshot)
        except Exception as error:  # the training thread raises it on all ranks
            # Keep the folder until all ranks are done, so that a rank still writing there does not fail as well.
            self.error = error
        finally:
            self.destination.close()

    def _write_part(self, snapshot: Snapshot) -> None:
        if self.rank != 0:
            self._send(snapshot)
            return
        manifest = snapshot.manifest(self.step, self.size)
        _add_files(manifest, self._collect(snapshot))
        self.destination.commit(manifest, self._check_permitted)
        self._after_commit()

    def _collect(self, snapshot: Snapshot) -> list[SaveReport]:
        """On the chief: write its files; return the report of every rank once their files are in the folder, too."""
        reports = [self.write_own(snapshot)]
        shortest, longest = self.destination.polls
        for rank in range(1, self.size):
            seconds = shortest
            while (report := self.destination.take_report(rank)) is None:
                self.check_cancelled()
                time.sleep(seconds)
                seconds = min(2 * seconds, longest)
            path, data = report
            reports.append(checked(json_of(data, path), _REPORT, path))
        return reports

    def _send(self, snapshot: Snapshot) -> None:
        """On another rank: bring its part into the folder."""
        report = self.write_own(snapshot)
        self.destination.send_report(self.rank, json.dumps(report._asdict()))

    def _check_permitted(self) -> None:
        self.check_cancelled()
        self._before_commit()


def _add_files(manifest: Manifest, reports: Sequence[SaveReport]) -> None:
    """Add the files that all ranks have written, and the parts of tensors in them."""
    for report in reports:
        manifest.files |= report.files
    for name, entry in manifest.variables.items():
        parts = [
            Part(file, record.tensors[name], report.indices.get(name))
            for report in reports
            for file, record in report.files.items()
            if name in record.tensors
        ]
        manifest.variables[name] = replace(entry, parts=tuple(parts))
