"""Files of records: TFRecord, ArrayRecord, and lines of text. Blocks are runs of records."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hvdkit.cluster.logs import get_logger
from hvdkit.data.aligned import Nest
from hvdkit.data.files.formats import Block, FileLayout, Format, OnError
from hvdkit.data.files.listing import File
from hvdkit.data.files.offsets import offsets_of
from hvdkit.data.files.storage import OpenFile, opened
from hvdkit.errors import DataError, describe, printable

if TYPE_CHECKING:
    import tensorflow as tf

BLOCK_BYTES = 2**20
_LEAST_BLOCK_BYTES = 2**16
_BLOCKS_OF_SMALL_FILE = 64
_MOST_RECORDS = 2**16
_MOST_MAPS = 128
_MOST_OFFSET_BYTES = 2**26  # of the offsets of small files in memory; those of others are read from their caches again
_GAP = 4096  # bytes between two records that are still read at once
Parse: TypeAlias = "Callable[[tf.Tensor], Nest] | Mapping[str, object] | None"


def rows_of_blocks(records: int, size: int) -> list[int]:
    """Return the numbers of records in the blocks of a file with ``records`` records and ``size`` bytes.

    Blocks have about 1 MiB, or less in files that would have fewer than 64, down to 64 KiB: two blocks of each lane are
    read for a part of their rows only.
    """
    block_bytes = min(BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, size // _BLOCKS_OF_SMALL_FILE))
    per_block = max(1, min(_MOST_RECORDS, block_bytes * records // max(size, 1)))
    full, rest = divmod(records, per_block)
    return [per_block] * full + [rest] * (rest > 0)


class Parser:
    """Turns the records of a batch, in order, into its structure; ``parse`` is that of ``hk.data.tfrecord``."""

    def __init__(self, parse: Parse):
        if not (parse is None or callable(parse) or isinstance(parse, Mapping)):
            remedy = "pass e.g. {'x': tf.io.FixedLenFeature([4], tf.float32)}"
            raise TypeError(describe("parse", parse, "a dict of features, a function or None", remedy))
        self._parse = parse
        self._function: tf.types.experimental.ConcreteFunction | None = None

    def __call__(self, records: np.ndarray) -> Nest:
        """Return a structure of arrays ``[len(records), ...]``, from an array of bytes."""
        if self._parse is None:
            return records
        import tensorflow as tf

        try:
            with tf.device("CPU:0"):
                if self._function is None:
                    # A concrete function: TensorFlow would warn of retracing if a program creates several sources.
                    self._function = tf.function(self._parsed).get_concrete_function(tf.TensorSpec([None], tf.string))
                parsed = self._function(tf.constant(records, tf.string))
        except tf.errors.InvalidArgumentError as error:
            reason = error.message.partition("\n\t [[")[0].rpartition("\n")[2]
            remedy = "correct the features; for lists of any length pass a dict with tf.io.RaggedFeature"
            raise ValueError(describe("parse", reason, "records of one form", remedy)) from error
        return tf.nest.map_structure(lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, parsed)

    def _parsed(self, records: tf.Tensor) -> Nest:
        import tensorflow as tf

        if isinstance(self._parse, Mapping):
            return tf.io.parse_example(records, dict(self._parse))
        assert self._parse is not None
        dataset = tf.data.Dataset.from_tensor_slices(records).map(
            self._parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )
        return dataset.batch(tf.shape(records, tf.int64)[0]).get_single_element()


def as_objects(records: Sequence[bytes]) -> np.ndarray:
    """Return an array of objects."""
    array = np.empty(len(records), object)
    array[:] = records
    return array


class RecordFormat(Format):
    """Files of records whose offsets are found once and cached.

    Attributes:
        kind: The format.
        offsets_key: The format, and what else determines the offsets, which are cached under this name.
        damage_key: The format, and what else determines which records are damaged.
    """

    kind: str

    def __init__(self, on_error: OnError) -> None:
        self.skips = on_error == "skip"
        self.offsets_key = self.damage_key = self.kind
        self._offsets: OrderedDict[File, np.ndarray] = OrderedDict()  # the oldest first
        self._offset_bytes = 0
        self._maps: OrderedDict[File, np.ndarray] = OrderedDict()  # those of large files, the oldest first
        self._lock = threading.Lock()

    @abstractmethod
    def find_offsets(self, file: OpenFile) -> np.ndarray:
        """Return the offset of each record, and the end of the last, uint64 ``[records + 1]``."""

    @abstractmethod
    def contents(self, pieces: Sequence[bytes], file: File, numbers: np.ndarray) -> list[bytes]:
        """Return the contents of records, given their bytes and their numbers in the file, after checking them."""

    def scan(self, file: File) -> FileLayout:
        records = len(self._offsets_of(file)) - 1
        damaged = np.array([], np.int64)
        if self.skips:
            damaged = offsets_of(file, f"{self.damage_key}, damaged", self._find_damaged).astype(np.int64)
        rows = rows_of_blocks(records - len(damaged), file.size)
        if (end := int(self._offsets_of(file)[-1])) < file.size:
            url = printable(file.url)
            get_logger().warning("on_error='skip': skipped %s from record %d, byte %d, on", url, records, end)
            damaged = np.append(damaged, records)  # and those after it, whose number is not known
        return FileLayout(rows, self.kind, max(BLOCK_BYTES, file.size // max(1, records)), damaged)

    def load_rows(self, file: File, layout: FileLayout, rows: np.ndarray) -> Block:
        with opened(file) as source:
            return self.block(source, layout.record_numbers(rows))

    def block(self, source: OpenFile, numbers: np.ndarray) -> Block:
        """Return what :meth:`take` needs of records, by their ascending numbers in the file."""
        return as_objects(self._records(source, numbers))

    def _records(self, source: OpenFile, numbers: np.ndarray) -> list[bytes]:
        """Return records by their ascending numbers in the file."""
        offsets = self._offsets_of(source.file)
        pieces = read_pieces(source, offsets[numbers].astype(np.int64), offsets[numbers + 1].astype(np.int64))
        return self.contents(pieces, source.file, numbers)

    def _find_damaged(self, source: OpenFile) -> np.ndarray:
        """Return the numbers of the records that cannot be read, uint64."""
        offsets = self._offsets_of(source.file)
        damaged = []
        first = 0
        while first < (records := len(offsets) - 1):
            after = min(records, int(np.searchsorted(offsets, offsets[first] + np.uint64(BLOCK_BYTES))))
            run = np.arange(first, max(after, first + 1))
            first += len(run)
            try:
                self._records(source, run)
            except DataError:
                damaged += [number for number in run.tolist() if not self._is_readable(source, number)]
        return np.array(damaged, np.uint64)

    def _is_readable(self, source: OpenFile, number: int) -> bool:
        try:
            self._records(source, np.array([number]))
        except DataError:
            return False
        return True

    def _offsets_of(self, file: File) -> np.ndarray:
        with self._lock:
            if (found := self._offsets.get(file, self._maps.get(file))) is not None:
                return found
        found = offsets_of(file, self.offsets_key, self.find_offsets)
        with self._lock:
            if isinstance(found, np.memmap):
                self._maps[file] = found
                if len(self._maps) > _MOST_MAPS:
                    self._maps.popitem(last=False)
            elif file not in self._offsets:
                self._offsets[file] = found
                self._offset_bytes += found.nbytes
                while self._offset_bytes > _MOST_OFFSET_BYTES:
                    self._offset_bytes -= self._offsets.popitem(last=False)[1].nbytes
        return found


def read_pieces(source: OpenFile, starts: np.ndarray, ends: np.ndarray) -> list[bytes]:
    """Return parts of a file, ascending. Those that are close together are read at once."""
    breaks = (np.flatnonzero(starts[1:] - ends[:-1] > _GAP) + 1).tolist()
    first_bytes = starts.tolist()
    last_bytes = ends.tolist()
    pieces = []
    for first, last in zip([0, *breaks], [*breaks, len(starts)], strict=True):
        start = first_bytes[first]
        data = source.read(start, last_bytes[last - 1] - start)
        if last - first == 1:
            pieces.append(data)
        else:
            spans = zip(first_bytes[first:last], last_bytes[first:last], strict=True)
            pieces += [data[a - start : b - start] for a, b in spans]
    return pieces
