"""Files of records: TFRecord, ArrayRecord, and lines of text. Blocks are runs of records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdkit.data.files.listing import File
from hvdkit.data.files.offsets import offsets_of
from hvdkit.data.files.source import BlockRows, FileLayout, OnError
from hvdkit.data.files.storage import OpenFile, opened
from hvdkit.errors import DataError, describe

BLOCK_BYTES = 2**20
_MOST_RECORDS = 2**16
_GAP = 4096  # bytes between two records that are still read at once
Parse = Callable[[Any], Any] | Mapping[str, Any] | None


def rows_of_blocks(records: int, size: int) -> list[int]:
    """Return the numbers of records in blocks of about 1 MiB, of a file with ``records`` records and ``size`` bytes."""
    per_block = max(1, min(_MOST_RECORDS, BLOCK_BYTES * records // max(size, 1)))
    full, rest = divmod(records, per_block)
    return [per_block] * full + [rest] * (rest > 0)


class Parser:
    """Turns the records of a batch, in order, into its structure.

    Args:
        parse: A dict of ``tf.io`` features, for records that are ``tf.train.Example``; a TensorFlow function of one
            record, a scalar string tensor; or None, which leaves the records as they are.
    """

    def __init__(self, parse: Parse):
        if not (parse is None or callable(parse) or isinstance(parse, Mapping)):
            remedy = "pass e.g. {'x': tf.io.FixedLenFeature([4], tf.float32)}"
            raise TypeError(describe("parse", parse, "a dict of features, a function or None", remedy))
        self._parse = parse
        self._function: Any = None

    def __call__(self, records: Sequence[bytes]) -> Any:
        """Return a structure of arrays ``[len(records), ...]``."""
        if self._parse is None:
            array = np.empty(len(records), object)
            array[:] = records
            return array
        import tensorflow as tf

        if self._function is None:
            self._function = tf.function(self._parsed, input_signature=[tf.TensorSpec([None], tf.string)])
        with tf.device("CPU:0"):
            parsed = self._function(tf.constant(records, tf.string, [len(records)]))
        is_dense = lambda leaf: isinstance(leaf, tf.Tensor)  # noqa: E731
        return tf.nest.map_structure(lambda leaf: leaf.numpy() if is_dense(leaf) else leaf, parsed)

    def _parsed(self, records: Any) -> Any:
        import tensorflow as tf

        if isinstance(self._parse, Mapping):
            return tf.io.parse_example(records, dict(self._parse))
        assert self._parse is not None
        dataset = tf.data.Dataset.from_tensor_slices(records).map(
            self._parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )
        return dataset.batch(tf.shape(records, tf.int64)[0]).get_single_element()


def in_places(parts: Sequence[BlockRows], rows: int) -> list[bytes]:
    """Return the ``rows`` records of a batch, in order."""
    records: list[bytes] = [b""] * rows
    for block, each, places in parts:
        for row, place in zip(each.tolist(), places.tolist(), strict=True):
            records[place] = block[row]
    return records


class RecordFormat(ABC):
    """Files of records whose offsets are found once and cached.

    Attributes:
        name: The name of the public function.
        kind: The format and the options that determine the offsets.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    reads_rows = True
    kind: str

    def __init__(self, on_error: OnError) -> None:
        self.skips = on_error == "skip"
        self._offsets: dict[str, np.ndarray] = {}

    @abstractmethod
    def find_offsets(self, file: OpenFile) -> np.ndarray:
        """Return the offset of each record, and the end of the last, uint64 ``[records + 1]``."""

    @abstractmethod
    def record(self, data: bytes, file: File, row: int, offset: int) -> bytes:
        """Return the content of a record, given its bytes."""

    @abstractmethod
    def batch(self, records: Sequence[bytes]) -> Any:
        """Return a batch of records."""

    def scan(self, file: File) -> FileLayout:
        records = len(self._offsets_of(file)) - 1
        damaged = np.array([], np.int64)
        if self.skips:
            damaged = offsets_of(file, f"{self.kind}, damaged", self._find_damaged).astype(np.int64)
        rows = rows_of_blocks(records - len(damaged), file.size)
        return FileLayout(rows, self.kind, max(BLOCK_BYTES, file.size // max(1, records)), damaged)

    def load(self, file: File, layout: FileLayout, block: int) -> list[bytes]:
        return self._read(file, layout, block, np.arange(layout.block_rows[block]))

    def load_rows(self, file: File, layout: FileLayout, block: int, rows: np.ndarray) -> tuple[list[bytes], np.ndarray]:
        return self._read(file, layout, block, rows), np.arange(len(rows))

    def take(self, parts: Sequence[BlockRows], rows: int) -> Any:
        return self.batch(in_places(parts, rows))

    def _read(self, file: File, layout: FileLayout, block: int, rows: np.ndarray) -> list[bytes]:
        """Return the records ``rows``, ascending, of a block. Those that are close together are read at once."""
        numbers = block * layout.block_rows[0] + rows
        # Skip damaged records: d_j is passed by the rows from d_j - j on.
        numbers += np.searchsorted(layout.damaged - np.arange(len(layout.damaged)), numbers, side="right")
        with opened(file) as source:
            return self._records(source, numbers)

    def _records(self, source: OpenFile, numbers: np.ndarray) -> list[bytes]:
        """Return records by their ascending numbers in the file."""
        file, offsets = source.file, self._offsets_of(source.file)
        starts, ends = offsets[numbers].astype(np.int64), offsets[numbers + 1].astype(np.int64)
        breaks = np.flatnonzero(starts[1:] - ends[:-1] > _GAP) + 1
        records = []
        for run in np.split(np.arange(len(numbers)), breaks):
            first = int(starts[run[0]])
            data = source.read(first, int(ends[run[-1]]) - first)
            for i in run.tolist():
                start = int(starts[i])
                records.append(self.record(data[start - first : ends[i] - first], file, int(numbers[i]), start))
        return records

    def _find_damaged(self, source: OpenFile) -> np.ndarray:
        """Return the numbers of the records that cannot be read, uint64."""
        damaged = []
        for number in range(len(self._offsets_of(source.file)) - 1):
            try:
                self._records(source, np.array([number]))
            except DataError:
                damaged.append(number)
        return np.array(damaged, np.uint64)

    def _offsets_of(self, file: File) -> np.ndarray:
        if file.url not in self._offsets:
            kind = f"{self.kind}, without the end" if self.skips else self.kind
            self._offsets[file.url] = offsets_of(file, kind, self.find_offsets)
        return self._offsets[file.url]
