"""One save: a snapshot of this rank's part, the files that are written, and the commit by the chief.

A transport brings the parts of all ranks together. With :class:`SharedFolder` every rank writes its own part;
:class:`~hvdkit.checkpoint.chief_io.ThroughChief` is for ranks that do not share a file system. A destination
(:mod:`hvdkit.checkpoint.destination`) is where they are written: a local folder, or a store.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from hvdkit.checkpoint import stores
from hvdkit.checkpoint.destination import destination_of
from hvdkit.checkpoint.entries import State, StateTensor
from hvdkit.checkpoint.files import RunPath
from hvdkit.checkpoint.folder import latest
from hvdkit.checkpoint.manifest import RANK_VALUES, Manifest, replicated_name, shard_name
from hvdkit.checkpoint.schema import Schema, array, checked, json_of, mapping, plain, too_many_values, typed
from hvdkit.checkpoint.tensor_entry import Part, TensorEntry
from hvdkit.checkpoint.tensorfile import FileRecord, NonFiniteTensor, write_file
from hvdkit.errors import CheckpointError, NonFiniteError

Indices: TypeAlias = Mapping[str, Sequence[Sequence[int]]]
"""For each sharded tensor: start, stop and step along each axis of a rank's part."""
_NICENESS = 10  # niceness increment of a background save, so that training takes precedence if cores are scarce


class SaveReport(NamedTuple):
    """What one rank has written.

    Attributes:
        files: the records of its files, by name.
        indices: the index of its part of each sharded tensor, as for JSON.
    """

    files: dict[str, FileRecord]
    indices: Indices

    @classmethod
    def of(cls, files: dict[str, tuple[Any, ...]], indices: Indices) -> SaveReport:
        """Return the report that was written as JSON; the manifest made of it is checked as a whole."""
        return cls({name: FileRecord(*record) for name, record in files.items()}, indices)


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

    def release(self) -> None:
        """Free the memory of the values, once they are in files."""
        self.tensors = [tensor.released() for tensor in self.tensors]

    def replicated_tensors(self) -> list[StateTensor]:
        """Return the tensors for the chief's file of replicated tensors."""
        return [t for t in self.tensors if t.kind == "replicated"]

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
        return {t.name: [(i.start, i.stop, i.step) for i in t.index] for t in self.tensors if t.index is not None}


class CancelledSaveError(CheckpointError):
    """This rank stopped writing because another rank had failed."""


class Transport(Protocol):
    """How the parts of all ranks get into one folder.

    Attributes:
        uses_network: it calls collectives, so the save must run in the thread that trains.
    """

    uses_network: bool

    def collect(self, save: Save, snapshot: Snapshot) -> list[SaveReport]:
        """Write the chief's files; return the report of every rank once their files are in the folder, too."""

    def send(self, save: Save, snapshot: Snapshot) -> None:
        """Bring the part of a rank other than the chief into the folder."""


class SharedFolder:
    """Every rank writes its own file, and then a small report next to it that the chief waits for.

    Ranks exchange only files: training may be in the middle of a collective.
    """

    uses_network = False

    def collect(self, save: Save, snapshot: Snapshot) -> list[SaveReport]:
        """Write the chief's files, and wait for the other ranks' reports."""
        reports = [save.write_own(snapshot)]
        shortest, longest = save.destination.polls
        for rank in range(1, save.size):
            seconds = shortest
            while (report := save.destination.take_report(rank)) is None:
                save.check_cancelled()
                time.sleep(seconds)
                seconds = min(2 * seconds, longest)
            path, data = report
            reports.append(checked(json_of(data, path), _REPORT, path))
        return reports

    def send(self, save: Save, snapshot: Snapshot) -> None:
        """Write this rank's file and its report."""
        report = save.write_own(snapshot)
        save.destination.send_report(save.rank, json.dumps(report._asdict()))


class Save:
    """A save in progress on this rank.

    Args:
        target: the checkpoint's folder.
        snapshot: this rank's part.
        step: steps trained.
        rank, size: this rank, and the number of ranks.
        token: part of the temporary name; the same on every rank, unique for every save.
        transport: brings the parts of all ranks together.
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
        transport: Transport | None = None,
        before_commit: Callable[[], None] = lambda: None,
        after_commit: Callable[[], None] = lambda: None,
        background: bool = False,
    ):
        self.target = target
        self.step = step
        self.rank = rank
        self.size = size
        self.destination = destination_of(target, token)
        self.error: Exception | None = None
        self._transport = transport or SharedFolder()
        self._before_commit = before_commit
        self._after_commit = after_commit
        self._background = background
        self._cancelled = threading.Event()
        # A daemon thread: a job that exits with an error must not wait for reports that will never arrive.
        # Only the thread refers to the snapshot, so that its memory is released when the thread ends.
        self._thread = threading.Thread(target=self._run, args=[snapshot], name="hvdkit-save", daemon=True)

    def start(self) -> Save:
        """Start writing, and return immediately; with a transport that uses the network, return when it is over."""
        if self._transport.uses_network:
            self._thread.run()
        else:
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

    def clean_up(self) -> None:
        """Remove the files of a failed save, once all ranks are done."""
        self.destination.discard(is_chief=self.rank == 0)

    def write_own(self, snapshot: Snapshot) -> SaveReport:
        """Write this rank's files: its shard and, on the chief, the replicated tensors."""
        self.destination.prepare()
        name = replicated_name(self.destination.suffix)
        has_replicated = self.rank == 0 and bool(snapshot.replicated_tensors())
        files = {name: self._write(name, snapshot.replicated_tensors(), 0, {})} if has_replicated else {}
        shard = self._write_shard(self.rank, snapshot.shard_tensors(), snapshot.metadata(), snapshot.indices())
        snapshot.release()
        report = SaveReport(files | shard.files, shard.indices)
        self._publish(report)
        return report

    def write_shard(
        self, rank: int, tensors: list[StateTensor], metadata: dict[str, str], indices: Indices
    ) -> SaveReport:
        """Write and publish the file with the tensors and plain values of ``rank``, if there are any."""
        report = self._write_shard(rank, tensors, metadata, indices)
        self._publish(report)
        return report

    def _publish(self, report: SaveReport) -> None:
        for name in report.files:
            self.destination.publish(name)

    def _write_shard(
        self, rank: int, tensors: list[StateTensor], metadata: dict[str, str], indices: Indices
    ) -> SaveReport:
        name = shard_name(rank, self.size, self.destination.suffix)
        return SaveReport({name: self._write(name, tensors, rank, metadata)} if tensors or metadata else {}, indices)

    def _write(self, name: str, tensors: list[StateTensor], rank: int, metadata: dict[str, str]) -> FileRecord:
        """Write a file of the tensors of ``rank``; an error about non-finite values names the rank."""
        try:
            return write_file(self.destination.folder / name, tensors, metadata=metadata)
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
        if self.rank == 0:
            manifest = build_manifest(snapshot, self._transport.collect(self, snapshot), step=self.step)
            self.destination.commit(manifest, self._check_permitted)
            self._after_commit()
        else:
            self._transport.send(self, snapshot)

    def _check_permitted(self) -> None:
        self.check_cancelled()
        self._before_commit()


def build_manifest(snapshot: Snapshot, reports: list[SaveReport], *, step: int) -> Manifest:
    """Return the manifest of the files that all ranks have written.

    Args:
        snapshot: the chief's snapshot.
        reports: for each rank, the records of its files and its indices of sharded tensors.
        step: steps trained.
    """
    manifest = Manifest(step=step, size=len(reports), values=snapshot.values)
    for report in reports:
        manifest.files |= report.files
    manifest.rank_values = list(snapshot.rank_values)
    for tensor in snapshot.tensors:
        parts = [
            Part(name, record.tensors[tensor.name], _part_index(tensor, report))
            for report in reports
            for name, record in report.files.items()
            if tensor.name in record.tensors
        ]
        manifest.variables[tensor.name] = TensorEntry(
            tensor.kind, tensor.shape, tensor.dtype.name, tuple(parts), tensor.partition
        )
    return manifest


def _part_index(tensor: StateTensor, report: SaveReport) -> tuple[tuple[int, int, int], ...] | None:
    if tensor.index is None:
        return None
    return tuple(cast("tuple[int, int, int]", tuple(axis)) for axis in report.indices[tensor.name])
