"""ArrayRecord files. The format has its own index, so that no offsets are needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from hvdkit.data.files.listing import File
from hvdkit.data.files.records import BLOCK_BYTES, Parse, Parser, in_places, rows_of_blocks
from hvdkit.data.files.source import BlockRows, FileLayout
from hvdkit.data.files.storage import opened
from hvdkit.errors import DataError


class ArrayRecordFormat:
    """Records of ArrayRecord files."""

    name = "array_record"
    suffixes: tuple[str, ...] = ()
    reads_rows = True

    def __init__(self, parse: Parse):
        self._parser = Parser(parse)

    def scan(self, file: File) -> FileLayout:
        with _reader(file) as reader:
            return FileLayout(rows_of_blocks(reader.num_records(), file.size), "ArrayRecord", BLOCK_BYTES)

    def load(self, file: File, layout: FileLayout, block: int) -> list[bytes]:
        return self._read(file, layout, block, np.arange(layout.block_rows[block]))

    def load_rows(self, file: File, layout: FileLayout, block: int, rows: np.ndarray) -> tuple[list[bytes], np.ndarray]:
        return self._read(file, layout, block, rows), np.arange(len(rows))

    def take(self, parts: Sequence[BlockRows], rows: int) -> Any:
        return self._parser(in_places(parts, rows))

    @staticmethod
    def _read(file: File, layout: FileLayout, block: int, rows: np.ndarray) -> list[bytes]:
        numbers = (block * layout.block_rows[0] + rows).tolist()
        with _reader(file) as reader:
            try:
                if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
                    return reader.read(numbers[0], numbers[-1] + 1)
                return reader.read(numbers)
            except (RuntimeError, ValueError, IndexError) as error:
                records = f"records {numbers[0]} to {numbers[-1]}"
                raise DataError(f"{records} of {file.url} are damaged: {error}") from error


@contextlib.contextmanager
def _reader(file: File) -> Iterator[Any]:
    with opened(file) as open_file:
        if open_file.path is None:
            raise DataError(f"{file.url}: ArrayRecord files must be local; copy them, or mount the store")
        reader = ArrayRecordReader(open_file.path, options="readahead_buffer_size:0", file_reader_buffer_size=2**15)
        try:
            yield reader
        finally:
            try:
                reader.close()  # raises what has gone wrong since it was opened
            except RuntimeError as error:
                raise DataError(f"{file.url} is not a whole ArrayRecord file: {error}") from error
