"""TensorBoard event files without duplicate or lost steps, even if a run is killed and resumed repeatedly."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.util.tensor_util import make_tensor_proto

from hvdkit import cluster
from hvdkit.checkpoint import stores
from hvdkit.checkpoint.files import RunPath, checkpoint_errors, local_path, open_regular, regular_size, remedy_of
from hvdkit.cluster.agreement import run_on_all_ranks
from hvdkit.cluster.logs import get_logger
from hvdkit.errors import CheckpointError, describe
from hvdkit.machine.replacing import replaced, sync
from hvdkit.machine.scratch import ScratchFolder
from hvdkit.watchdog.reporter import reporter

if TYPE_CHECKING:
    from upath import UPath

BUCKETS = 30
"""Buckets per histogram, the same number as TensorBoard's own."""

# An event file is a TFRecord file: length (8 bytes) and its checksum (4), data, checksum (4).
_FRAME_BYTES = 16
_NO_NUMBERS = "OSUMmc"  # kinds of dtypes
_MAX_ELEMENTS = 100  # of an array in logs of which each becomes a scalar
_PREFIX = "events.out.tfevents."
# TensorFlow's codes of failed writes; a full disk and an exhausted quota have the same.
_ERRNO: Mapping[int, int] = {
    tf.errors.RESOURCE_EXHAUSTED: errno.ENOSPC,
    tf.errors.PERMISSION_DENIED: errno.EACCES,
    tf.errors.NOT_FOUND: errno.ENOENT,
}
_PUBLISH_SECONDS = 60.0
_REWRITTEN = ".rewritten"  # without the prefix, so that TensorBoard does not read a half-written file


class Summaries(contextlib.AbstractContextManager["Summaries"]):
    """Write scalars, histograms and images of one run to ``folder`` as a TensorBoard event file.

    This class is not distributed: only the chief creates an instance.

    A run that was killed after step 130 and resumes from its checkpoint at step 100 repeats steps 101 to 130. With
    ``resume_at=100``, Summaries first removes the events of these steps, so that each step appears once. This requires
    that a checkpoint of step S is committed only after :meth:`flush` of all steps up to S: everything before a
    checkpoint is then on disk, and everything after it is written again.

    Every method that writes raises CheckpointError if the disk write fails. The file is then abandoned, because records
    after an incomplete one cannot be read.

    Args:
        folder: the folder of event files; created if missing.
        resume_at: the step of the checkpoint that the run resumes from (0 for a fresh start), or None to keep all files
            in the folder unchanged.

    Raises:
        CheckpointError: the folder cannot be read or written.
    """

    # Write events one by one with TensorFlow's record writer. Its summary writer (tf.summary) ignores errors of single
    # records: if the disk is full temporarily, the file is only readable up to that record. TensorBoard's writer
    # computes checksums in Python and gets errors in a thread.

    def __init__(self, folder: str | Path, *, resume_at: int | None = None) -> None:
        folder = local_path(folder, "folder")
        with _file_errors(folder, "written"):
            folder.mkdir(parents=True, exist_ok=True)
        if resume_at is not None:
            remove_after(folder, resume_at)
        self._path = _new_path(folder)
        with _file_errors(self._path, "written"):
            self._writer: tf.io.TFRecordWriter | None = tf.io.TFRecordWriter(os.fsencode(self._path))
        self._write(Event(file_version="brain.Event:2"))
        if resume_at is not None:
            # Make a running TensorBoard discard the steps that were removed from the files.
            self._write(Event(step=resume_at + 1, session_log=SessionLog(status=SessionLog.START)))
        self.flush()
        with _file_errors(folder, "written"):
            sync(folder)

    def __exit__(self, *error: object) -> None:
        self.close()

    def scalars(self, step: int, /, **values: npt.ArrayLike) -> None:
        """Write numbers, or arrays or tensors with one element, by name; NaN and infinity are shown as such."""
        # Use simple_value instead of a tensor (as in tf.summary): TensorBoard shows both, but its EventAccumulator
        # keeps 10,000 scalars per tag and only 10 tensors.
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._write_values(step, [Summary.Value(tag=name, simple_value=x) for name, x in numbers.items()])

    def histogram(self, step: int, name: str, values: npt.ArrayLike) -> None:
        """Write the distribution of the finite elements of an array of any shape."""
        array = _on_host(values)
        if array.dtype.kind not in "biuf" or array.dtype.itemsize < 4:
            array = array.astype(np.float32)  # np.histogram does not support bfloat16, and overflows in float16
        array = array.reshape(-1)
        finite = np.isfinite(array)
        counts, edges = np.histogram(array if finite.all() else array[finite], BUCKETS)
        buckets = np.stack([edges[:-1], edges[1:], counts], axis=1).astype(np.float64)
        self._write_array(step, name, buckets, histogram_metadata)

    def image(self, step: int, name: str, images: npt.ArrayLike) -> None:
        """Write images ``[n, height, width, channels]`` or ``[height, width, channels]`` as PNG.

        They are uint8, or floats from 0 to 1 (others are clipped). 1 channel is gray, 2 gray and alpha, 3 RGB, 4 RGB
        and alpha.
        """
        array = _on_host(images)
        shape = array.shape
        array = array[None] if array.ndim == 3 else array
        floats = tf.as_dtype(array.dtype).is_floating
        if array.ndim != 4 or array.shape[-1] not in (1, 2, 3, 4) or not (array.dtype == np.uint8 or floats):
            expected = "[n, height, width, channels] or [height, width, channels] with 1 to 4 channels, uint8 or floats"
            got = f"shape {shape}, {array.dtype}"
            raise ValueError(describe(f"images ({name})", got, expected, "reshape or cast them"))
        height, width = array.shape[1:3]
        with tf.device("/CPU:0"):
            pixels = tf.image.convert_image_dtype(array, tf.uint8, saturate=True)
            encoded = [tf.io.encode_png(image).numpy() for image in pixels]
        strings = [str(width).encode(), str(height).encode(), *encoded]
        self._write_array(step, name, np.array(strings, object), image_metadata)

    def flush(self) -> None:
        """Sync everything written so far to disk."""
        with self._usable_writer() as writer:
            writer.flush()
            sync(self._path)

    def publish(self) -> None:
        """Make what was flushed visible to others: in a local folder, it is."""

    def close(self) -> None:
        """Flush and close the file. Does nothing if it is already closed, or after an error."""
        if self._writer is not None:
            self.flush()
            self._writer.close()
            self._writer = None

    def _write_array(self, step: int, name: str, array: np.ndarray, plugin: ModuleType) -> None:
        metadata = plugin.create_summary_metadata(display_name=None, description=None)
        self._write_values(step, [Summary.Value(tag=name, metadata=metadata, tensor=make_tensor_proto(array))])

    def _write_values(self, step: int, values: list[Summary.Value]) -> None:
        self._write(Event(step=int(step), summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        with self._usable_writer() as writer:
            writer.write(event.SerializeToString())

    @contextlib.contextmanager
    def _usable_writer(self) -> Iterator[tf.io.TFRecordWriter]:
        """Yield the writer, and abandon it on an error."""
        if self._writer is None:
            raise CheckpointError(f"{self._path}: closed; create new Summaries to write more")
        try:
            with _file_errors(self._path, "written"):
                yield self._writer
        except CheckpointError:
            self._writer = None
            raise


class StoreSummaries(Summaries):
    """Summaries in an object store, in which nothing can be appended to an object.

    They are written to a temporary local folder, and uploaded each minute and before each checkpoint.
    """

    def __init__(self, folder: UPath, *, resume_at: int | None = None) -> None:
        self._store = folder
        with checkpoint_errors(Path(tempfile.gettempdir()), "written"):
            self._scratch = ScratchFolder("hvdkit-summaries-")
        self._copies = self._scratch.path
        self._sizes: dict[str, int] = {}  # of the files in the store
        self._publishing = threading.Lock()
        self._ended = threading.Event()
        self._download()
        super().__init__(self._copies, resume_at=resume_at)
        self.publish()
        reporter().start_helper("hvdkit-summaries", self._publish_often)

    def publish(self) -> None:
        """Upload the event files that have changed."""
        with self._publishing:
            for file in sorted(self._copies.glob("events.*")):
                size = file.stat().st_size
                if self._sizes.get(file.name) != size:
                    stores.upload(file, self._store / file.name)
                    self._sizes[file.name] = size

    def close(self) -> None:
        """Close the file, and upload what is left. See :meth:`Summaries.close`."""
        if not self._ended.is_set():
            self._ended.set()
            try:
                super().close()
                self.publish()
            finally:
                self._scratch.close()

    def _download(self) -> None:
        """Fetch the event files of earlier runs, which may have steps that are trained again."""
        for name, size in stores.sizes(self._store).items():
            if size is not None and name.startswith("events."):
                path = self._store / name
                with contextlib.suppress(FileNotFoundError):  # it was removed, and is still listed
                    stores.request(path, "read", path.fs.get_file, path.path, str(self._copies / name))
                    self._sizes[name] = size

    def _publish_often(self) -> None:
        while not self._ended.wait(_PUBLISH_SECONDS):
            try:
                self.publish()
            except (CheckpointError, OSError):
                continue  # the next save reports it


def open_summaries(folder: RunPath, *, resume_at: int) -> Summaries | None:
    """Open the summaries of a run on the chief; return None on other ranks. Every rank calls it."""

    def open_on_chief() -> Summaries | None:
        if not cluster.is_chief():
            return None
        if isinstance(folder, Path):
            return Summaries(folder, resume_at=resume_at)
        return StoreSummaries(folder, resume_at=resume_at)

    return run_on_all_ranks(cluster.exchange(), "summaries", open_on_chief, error=CheckpointError)


def remove_after(folder: Path, step: int) -> None:
    """Remove events later than ``step`` and incomplete records of a killed writer from the event files in ``folder``.

    Only affected files are rewritten, atomically through a temporary file in the same folder: a kill at any time leaves
    either the old file or the new one. Subfolders are not touched.
    """
    temporary = folder / _REWRITTEN
    with _file_errors(temporary, "removed"):
        temporary.unlink(missing_ok=True)
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        with _file_errors(path, "read"):
            size = regular_size(path)
            readable, has_later = _scan(path, step)
        if size > readable:
            message = "%s: removed its last %d bytes, an incomplete record of a killed run"
            get_logger().warning(message, path, size - readable)
        if size > readable or has_later:
            with _file_errors(path, "written"):
                _rewrite(path, temporary, step)


def _scan(path: Path, step: int) -> tuple[int, bool]:
    """Return the size of a file's readable records in bytes, and whether any is later than ``step``."""
    readable = 0
    has_later = False
    for record, at in _records(path):
        readable += len(record) + _FRAME_BYTES
        has_later = has_later or at > step
    return readable, has_later


def _rewrite(path: Path, temporary: Path, step: int) -> None:
    with replaced(path, temporary, durable=True), tf.io.TFRecordWriter(os.fsencode(temporary)) as writer:
        for record, at in _records(path):
            if at <= step:
                writer.write(record)
        writer.flush()
    sync(path.parent)


def _records(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield a file's records one by one with their steps, up to the first incomplete one."""
    # TensorFlow allocates the length that a record claims, so it must not read one that is longer than the file.
    for record in itertools.islice(RawEventFileLoader(os.fsencode(path)).Load(), _frames(path)):
        try:
            yield record, Event.FromString(record).step
        except DecodeError as error:
            raise CheckpointError(f"{path}: has a record that is not an event ({error}); move it away") from error


def _frames(path: Path) -> int:
    """Return the number of records that are within the file, by the lengths that they claim."""
    count = position = 0
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while len(length := file.read(8)) == 8:
            position += int.from_bytes(length, "little") + _FRAME_BYTES
            if position > size:
                break
            file.seek(position)
            count += 1
    return count


def _new_path(folder: Path) -> Path:
    """Return the path of the next event file. TensorBoard reads the files of a folder in order of their names."""
    stamps = [path.name.removeprefix(_PREFIX).partition(".")[0] for path in folder.glob(f"{_PREFIX}*")]
    latest = max((int(stamp) for stamp in stamps if stamp.isdecimal()), default=0)
    # Sort after existing files, even when resuming within the same second or on a host whose clock is behind.
    stamp = max(int(time.time()), latest + 1)
    return folder / f"{_PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}"


def _on_host(value: object) -> np.ndarray:
    # np.asarray alone doesn't convert a bfloat16 scalar tensor.
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def numbers_in(logs: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers in Keras's logs, without text; those of an array by their index, e.g. ``f1/0``, ``f1/1``."""
    found: dict[str, float] = {}
    for name, value in logs.items():
        array = _on_host(value)
        if array.dtype.kind not in _NO_NUMBERS and array.size <= _MAX_ELEMENTS:
            elements = np.ndenumerate(array.astype(np.float64))
            found |= {"/".join([name, *map(str, index)]): float(element) for index, element in elements}
    return found


def _number(name: str, value: npt.ArrayLike) -> float:
    array = _on_host(value)
    if array.size != 1 or array.dtype.kind in _NO_NUMBERS:
        got = f"shape {array.shape}, {array.dtype}"
        raise TypeError(describe(name, got, "a single real number", "reduce it, e.g. to its mean"))
    return float(array.reshape(()))


@contextlib.contextmanager
def _file_errors(path: Path, done: str) -> Iterator[None]:
    """Turn file errors of Python and TensorFlow into a CheckpointError that names the file."""
    try:
        with checkpoint_errors(path, done):
            yield
    except tf.errors.OpError as error:
        reason = error.message.removeprefix(f"{path}; ")
        remedy = remedy_of(_ERRNO.get(error.error_code))
        raise CheckpointError(f"{path}: cannot be {done} ({reason}); {remedy}") from error
