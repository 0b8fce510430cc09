"""ArrayRecord files. The format has its own index, so that no offsets are needed."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from hvdkit.data.aligned import Nest
from hvdkit.data.files.formats import BlockRows, FileLayout, Format, require_rows, taken
from hvdkit.data.files.listing import File
from hvdkit.data.files.records import BLOCK_BYTES, Parse, Parser, as_objects, rows_of_blocks
from hvdkit.data.files.storage import OpenFile, opened_as
from hvdkit.errors import DataError, describe

_RECORDS_PER_BYTE = 2**16  # equal records, compressed
_first_process: int | None = None  # the one that first read a file


class ArrayRecordFormat(Format):
    """Records of ArrayRecord files."""

    name = "array_record"

    def __init__(self, parse: Parse):
        self._parser = Parser(parse)
        # Each reader reads the whole index of its file, and decodes with its own threads: one per file is enough.
        self._locks: defaultdict[File, threading.Lock] = defaultdict(threading.Lock)

    def scan(self, file: File) -> FileLayout:
        _require_first_process()
        with opened_as(file, _reader) as reader:
            records = require_rows(file, reader.num_records(), per_byte=_RECORDS_PER_BYTE)
            return FileLayout(rows_of_blocks(records, file.size), "ArrayRecord", BLOCK_BYTES)

    def load_rows(self, file: File, layout: FileLayout, rows: np.ndarray) -> np.ndarray:
        numbers = rows.tolist()
        _require_first_process()
        with self._locks[file], opened_as(file, _reader) as reader:
            try:
                if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
                    return as_objects(reader.read(numbers[0], numbers[-1] + 1))
                return as_objects(reader.read(numbers))
            except (RuntimeError, ValueError, IndexError) as error:
                records = f"records {numbers[0]} to {numbers[-1]}"
                raise DataError(f"{records} of {file.url} are damaged: {error}") from error

    def take(self, parts: Sequence[BlockRows], rows: int) -> Nest:
        return self._parser(taken(parts, rows))


def _require_first_process() -> None:
    """Raise RuntimeError in a forked process: the threads of the library exist in its parent only."""
    global _first_process
    _first_process = _first_process or os.getpid()
    if os.getpid() != _first_process:
        got = "a process forked after it had read"
        remedy = "start processes with the method 'spawn'"
        raise RuntimeError(describe("array_record", got, "the process that read first", remedy))


def _reader(file: OpenFile) -> ArrayRecordReader:
    if file.path is None:
        raise DataError(f"{file.file.url}: ArrayRecord files must be local; copy them, or mount the store")
    # The buffer is filled again for each chunk, which has one record if group_size is 1.
    reader = ArrayRecordReader(file.path, options="readahead_buffer_size:0", file_reader_buffer_size=64)
    if not reader.ok():
        try:
            reader.close()  # raises what has gone wrong
        except RuntimeError as error:
            raise DataError(f"{file.file.url} is not a whole ArrayRecord file: {error}") from error
    return reader
