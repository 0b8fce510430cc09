"""One save: a snapshot of this rank's part, and the thread that writes it to disk.

The threads do not use the network, because training may be in the middle of a collective. Each rank's thread writes its
shard file and then a small report next to it; the chief's thread waits for all reports and commits the checkpoint.
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
from typing import Any

from hvdkit.checkpoint.bounds import manifest_bytes
from hvdkit.checkpoint.entries import State, StateTensor
from hvdkit.checkpoint.files import atomic_file, checkpoint_errors, read_bounded, remove_folder
from hvdkit.checkpoint.folder import commit, temporary_path
from hvdkit.checkpoint.manifest import RANK_VALUES, REPLICATED, Manifest, Part, TensorEntry, shard_name
from hvdkit.checkpoint.schema import Schema, array, checked, json_of, mapping, plain, too_many_values, typed
from hvdkit.checkpoint.tensorfile import FileRecord, write_file
from hvdkit.errors import CheckpointError, NonFiniteError

_MIN_POLL_SECONDS = 0.002
_MAX_POLL_SECONDS = 0.01
_NICENESS = 10  # niceness increment of a background save, so that training takes precedence if cores are scarce


# What a rank tells the chief; build_manifest's result is checked as a whole.
_REPORT: Schema[dict[str, Any]] = typed(dict, files=mapping(array(plain, exactly=3)), indices=mapping(plain))


@dataclass
class Snapshot:
    """One rank's contribution to a checkpoint at a given step.

    Attributes:
        tensors: the state's tensors, in order; those that this rank writes have the values of that step.
        values: plain values, the same on all ranks.
        rank_values: plain values specific to this rank.
    """

    tensors: list[StateTensor] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    rank_values: dict[str, Any] = field(default_factory=dict)

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

    def indices(self) -> dict[str, Any]:
        """Return the index of this rank's part of each sharded tensor, for JSON."""
        return {t.name: [(i.start, i.stop, i.step) for i in t.index] for t in self.tensors if t.index is not None}


class CancelledSaveError(CheckpointError):
    """This rank stopped writing because another rank had failed."""


class Save:
    """A save in progress on this rank.

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
        target, step, rank: the arguments.
        error: the error on this rank, or None.
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
        before_commit: Callable[[], None] = lambda: None,
        after_commit: Callable[[], None] = lambda: None,
        background: bool = False,
    ):
        self.target = target
        self.step = step
        self.rank = rank
        self.error: Exception | None = None
        self._size = size
        self._folder = temporary_path(target, token)
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
        """True if this rank has finished: its files are on disk, or it failed."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for :attr:`done`, and return it."""
        self._thread.join(seconds)
        return self.done

    def cancel(self) -> None:
        """Stop writing because another rank failed."""
        self._cancelled.set()

    def clean_up(self) -> None:
        """Remove the files of a failed save, on the chief, once all ranks are done."""
        if self.rank == 0:
            remove_folder(self._folder)

    def _run(self, snapshot: Snapshot) -> None:
        if self._background:
            with contextlib.suppress(OSError):  # not permitted on this system
                os.nice(_NICENESS)  # on Linux only for this thread: nice(2), "C library/kernel differences"
        try:
            report = self._write_shard(snapshot)
            if self.rank == 0:
                self._complete(snapshot, report)
        except Exception as error:  # the training thread raises it on all ranks
            # Keep the folder until all ranks are done, so that a rank still writing there does not fail as well.
            self.error = error

    def _write_shard(self, snapshot: Snapshot) -> dict[str, Any]:
        """Write this rank's file and its report."""
        with checkpoint_errors(self._folder, "written"):
            self._folder.mkdir(parents=True, exist_ok=True)
        tensors = snapshot.shard_tensors()
        files = {}
        name = shard_name(self.rank, self._size)
        if tensors or snapshot.rank_values:
            files[name] = write_file(self._folder / name, tensors, metadata=snapshot.metadata())
        report = {"files": files, "indices": snapshot.indices()}
        if self.rank != 0:
            # The chief renames the folder after the last report: from then on it cannot be synced by this name.
            with atomic_file(self._report_path(self.rank), "w") as file:
                file.write(json.dumps(report))
        return report

    def _complete(self, snapshot: Snapshot, chief_report: dict[str, Any]) -> None:
        """Write the chief's files, wait for the other ranks' reports, and commit the checkpoint."""
        replicated = snapshot.replicated_tensors()
        files = {REPLICATED: write_file(self._folder / REPLICATED, replicated)} if replicated else {}
        reports = [chief_report, *(self._wait_for_report(rank) for rank in range(1, self._size))]
        build_manifest(snapshot, reports, files, step=self.step).write(self._folder)
        for rank in range(1, self._size):
            self._report_path(rank).unlink()
        self._check_cancelled()
        self._before_commit()
        commit(self._folder, self.target)
        self._after_commit()

    def _report_path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"

    def _wait_for_report(self, rank: int) -> dict[str, Any]:
        path = self._report_path(rank)
        seconds = _MIN_POLL_SECONDS
        while not path.exists():
            self._check_cancelled()
            time.sleep(seconds)
            seconds = min(2 * seconds, _MAX_POLL_SECONDS)
        report = checked(json_of(read_bounded(path, manifest_bytes(1)), path), _REPORT, path)
        report["files"] = {name: FileRecord(*record) for name, record in report["files"].items()}
        return report

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CancelledSaveError(f"{self.target}: another rank could not write its part")


def non_finite_error(message: str, rank: int, step: int, newest: str | None) -> NonFiniteError:
    """Return the error for a save that found NaN or an infinity; a restart would use the checkpoint ``newest``."""
    restart = f"would continue from {newest}" if newest else "would start from the initial values"
    return NonFiniteError(
        f"{message}, on rank {rank} at step {step}; this checkpoint is not saved, and a restart {restart}: lower the "
        "learning rate, or clip gradients"
    )


def build_manifest(
    snapshot: Snapshot, reports: list[dict[str, Any]], files: dict[str, FileRecord], *, step: int
) -> Manifest:
    """Return the manifest of the files that all ranks have written.

    Args:
        snapshot: the chief's snapshot.
        reports: for each rank, the records of its files and its indices of sharded tensors.
        files: records of the chief's files of replicated tensors.
        step: steps trained.
    """
    manifest = Manifest(step=step, size=len(reports), values=snapshot.values)
    manifest.files = dict(files)
    for report in reports:
        manifest.files |= report["files"]
    manifest.rank_values = list(snapshot.rank_values)
    for tensor in snapshot.tensors:
        if tensor.kind == "replicated":
            parts = [Part(REPLICATED, files[REPLICATED].tensors[tensor.name])]
        else:
            parts = [
                Part(name, record.tensors[tensor.name], _part_index(tensor, report))
                for report in reports
                for name, record in report["files"].items()
                if tensor.name in record.tensors
            ]
        manifest.variables[tensor.name] = TensorEntry(
            tensor.kind, tensor.shape, tensor.dtype.name, tuple(parts), tensor.partition
        )
    return manifest


def _part_index(tensor: StateTensor, report: dict[str, Any]) -> tuple[tuple[int, int, int], ...] | None:
    return None if tensor.index is None else tuple(tuple(axis) for axis in report["indices"][tensor.name])
