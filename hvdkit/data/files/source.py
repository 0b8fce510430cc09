"""Rows of many files as one source with random access, of which each rank reads only its own rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np
import optree
import xxhash

from hvdkit.data.aligned import Nest
from hvdkit.data.block_order import BlockOrder, Lanes
from hvdkit.data.files.formats import Block, BlockRows, Format, OnError, taken
from hvdkit.data.files.listing import File, Paths
from hvdkit.data.files.reading_ahead import BlockCache
from hvdkit.data.files.records import RecordFormat
from hvdkit.data.files.scanning import Scan, ScannedFile, agree_on_columns, columns_of
from hvdkit.data.order import Order, Shuffle, shuffled_indices
from hvdkit.data.permutation import Permutation
from hvdkit.errors import DataError, describe

if TYPE_CHECKING:
    import tensorflow as tf

_Rows = np.ndarray | slice  # a slice has a start and an end
# Up to this many examples (4 MB), the full shuffle of files is that of arrays: uniform over all permutations.
_UNIFORM_EXAMPLES = 2**20
# Numbers of rows that are turned into text at a time, which takes about 50 bytes each.
_DIGESTED_AT_ONCE = 2**12
# Up to this size, a full shuffle keeps files in memory that are read in blocks.
_SMALL_BYTES = 2**30


class FileSource:
    """Rows of files, from :func:`hvdkit.data.parquet` and its siblings.

    Attributes:
        examples: The number of rows, in all files.
        structure: A batch.
        files: The files, in order.
        layouts: What each of them has.
    """

    _mapped: Callable[[Nest], Nest] | None = None

    def __init__(
        self,
        paths: Paths,
        file_format: Format,
        on_error: OnError = "raise",
        arguments: Mapping[str, object] | None = None,
        on_scanned: Callable[[File], None] = lambda file: None,
    ):
        if on_error not in get_args(OnError):
            raise ValueError(describe("on_error", on_error, "'raise' or 'skip'", "choose one of the two"))
        if isinstance(paths, Iterator):  # they are listed several times
            paths = [*paths]
        self._scan = Scan(paths, file_format, on_error, arguments or {}, on_scanned)
        self._format = file_format
        files = self._scan.files({})
        self._path_columns = file_format.folder_columns([*files])
        self._use(files)
        self.structure = agree_on_columns(lambda: self.read(np.zeros(1, np.int64)))
        if self._path_columns is not None:
            self._path_columns.require_all(self.structure)

    def _use(self, files: Mapping[str, ScannedFile]) -> None:
        self._files = dict(files)
        self.files = [each.file for each in files.values()]
        self.layouts = [each.layout for each in files.values()]
        read = [(file, layout) for file, layout in files.values() if any(layout.block_rows)]
        for file, layout in read:
            if layout.kind != read[0][1].kind:
                got = f"{layout.kind} in {file.url}"
                expected = f"{read[0][1].kind}, as in {read[0][0].url}"
                raise ValueError(describe("paths", got, expected, "give files of one schema, or choose columns"))
        self._path_values = {} if self._path_columns is None else self._path_columns.values([*files])
        rows = [np.array(layout.block_rows, np.int64) for layout in self.layouts]
        self._block_starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *rows]))
        self._file_starts = np.cumsum([0, *map(np.sum, rows)])
        self._first_blocks = np.cumsum([0, *map(len, rows)])  # of each file
        self.examples = int(self._block_starts[-1])
        if self.examples == 0:
            got = f"{len(self.files)} file(s) without rows, from {self.files[0].url} on"
            raise ValueError(describe("paths", got, "at least one row", "check how they were written"))

    @property
    def names(self) -> list[str]:
        """The names of the files, relative to the paths that they were found at; the same on all hosts."""
        return [*self._files]

    def rows_of(self, name: str) -> int:
        """Return the number of rows of a file."""
        return sum(self._files[name].layout.block_rows)

    def selected(self, names: Sequence[str]) -> FileSource:
        """Return a source of some of the files, in this order."""
        other = copy.copy(self)
        other._use({name: self._files[name] for name in names})
        return other

    def listed_again(self) -> FileSource:
        """Return a source of the files that are found now; each rank scans a part of the new ones. A collective."""
        other = copy.copy(self)
        other._use(self._scan.files(self._files))
        return other

    def is_same(self, other: FileSource, name: str) -> bool:
        """Return whether ``other`` has this file, unchanged."""
        return name in other._files and other._files[name].file == self._files[name].file

    @property
    def skipped(self) -> dict[str, int]:
        """The number of records that are skipped in each file with damage; -1 for files that are skipped as a whole."""
        counts = {f.url: -1 if e.problem else len(e.damaged) for f, e in zip(self.files, self.layouts, strict=True)}
        return {url: count for url, count in counts.items() if count}

    @property
    def format_name(self) -> str:
        """The name of the function that made the source."""
        return self._format.name

    @property
    def kind(self) -> str:
        """The columns and types as text, those of the first file."""
        return ", ".join([self.layouts[0].kind, *(self._path_columns.kinds() if self._path_columns else [])])

    @property
    def needs_index(self) -> bool:
        """Whether the offsets of records must be found, because the files have no index."""
        return isinstance(self._format, RecordFormat)

    @property
    def reads_rows(self) -> bool:
        """Whether rows can be read without the rest of their block."""
        return self._format.reads_rows

    def read_times(self, shuffle: Shuffle, batch_size: int, size: int) -> float:
        """Return how many times the n/N examples of its part a rank reads in an epoch, approximately."""
        if shuffle.mode == "blocks":
            assert shuffle.lanes is not None
            touched = [-(-(r + 1) * shuffle.lanes // size) - r * shuffle.lanes // size for r in range(size)]
            return max(touched) * size / shuffle.lanes
        if self.reads_rows:
            return 1
        if self._is_kept(shuffle):
            return size
        block_rows: float = self.examples / self._first_blocks[-1]
        local_rows = batch_size / size
        # In order, the ranks share each block; shuffled, a batch has about one row of a block.
        return block_rows if shuffle.seed is not None else max(1, min(size, block_rows / local_rows))

    def _is_kept(self, shuffle: Shuffle) -> bool:
        """Return whether all blocks are kept in memory."""
        is_random = not self.reads_rows and shuffle.mode == "full" and shuffle.seed is not None
        return is_random and self.is_small

    @property
    def is_small(self) -> bool:
        """Whether all blocks take at most a GiB of memory."""
        return sum(layout.largest_block * len(layout.block_rows) for layout in self.layouts) <= _SMALL_BYTES

    def __repr__(self) -> str:
        blocks = self._first_blocks[-1]
        return f"hk.data.{self._format.name}({len(self.files)} files, {self.examples} rows, {blocks} blocks)"

    def map(self, function: Callable[[Nest], Nest]) -> FileSource:
        """Return a source whose batches are ``function(batch)``; for example ``(x, y)`` for Keras.

        The function is called by the threads that read, with batches of any number of rows.

        Raises:
            ValueError: The result does not have the rows of the batch.

        Example:
            >>> rows = hk.data.parquet("clicks/")  # doctest: +SKIP
            >>> pairs = rows.map(lambda batch: (batch["items"], batch["label"]))  # doctest: +SKIP
        """
        other = copy.copy(self)
        before = self._mapped
        other._mapped = function if before is None else lambda batch: function(before(batch))
        other.structure = other.read(np.zeros(2, np.int64))
        for leaf in optree.tree_leaves(other.structure, none_is_leaf=True) or [other.structure]:
            if not getattr(leaf, "shape", ()) or leaf.shape[0] != 2:
                got = f"{type(leaf).__name__} of shape {getattr(leaf, 'shape', ())} for a batch of 2 rows"
                remedy = "return arrays of whole batches, alone or in tuples and dicts"
                raise ValueError(describe("function", got, "arrays [rows, ...]", remedy))
        return other

    def order(self, shuffle: Shuffle, epoch: int, batch_size: int) -> Order | None:
        """Return the order of an epoch, in constant memory."""
        if shuffle.mode == "blocks":
            assert shuffle.lanes is not None
            lanes = Lanes(self.examples, batch_size, shuffle.lanes)
            before = epoch * self.examples
            blocks = self.block_order(shuffle, lanes.starts + before)

            def of(positions: np.ndarray) -> np.ndarray:
                lane, places = lanes(positions)
                return blocks(lane, places + before)

            return of
        if shuffle.seed is None:
            return None
        if self.examples <= _UNIFORM_EXAMPLES:
            return shuffled_indices(self.examples, (shuffle.seed, epoch)).__getitem__
        return Permutation(self.examples, (shuffle.seed, epoch))

    def block_order(self, shuffle: Shuffle, lane_starts: np.ndarray) -> BlockOrder:
        """Return the order of blocks and rows for lanes that begin at these places; see :class:`BlockOrder`."""
        assert shuffle.lanes is not None and shuffle.buffer is not None
        window = max(1, shuffle.buffer // shuffle.lanes)
        return BlockOrder(self._block_starts, lane_starts, window, shuffle.seed)

    def reader(self, shuffle: Shuffle) -> EpochReader:
        """Return a reader for an epoch. It keeps blocks whose other rows are needed soon."""
        is_kept = self._is_kept(shuffle)
        if shuffle.mode == "full" and not is_kept and (self.reads_rows or shuffle.seed is not None):
            return EpochReader(self.read)
        cache = BlockCache(self._load, np.diff(self._block_starts), keep=is_kept)
        return EpochReader(lambda indices: self.read(indices, cache), cache.next_batch)

    def read(self, indices: np.ndarray, cache: BlockCache[Block] | None = None) -> Nest:
        """Return the rows ``indices``, int64 ``[m]``, in this order. The cache keeps each block for later calls."""
        by_block = cache is not None or not self.reads_rows
        parts = []
        for number, rows, places in _pieces(indices, self._block_starts if by_block else self._file_starts):
            if by_block:
                count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
                block = self._load(number) if cache is None else cache.get(number, count)
            else:
                wanted = _as_array(rows)
                rows = slice(0, len(wanted))
                if not np.diff(wanted).all():  # filler may repeat rows
                    wanted, rows = np.unique(wanted, return_inverse=True)
                block = self._format.load_rows(self.files[number], self.layouts[number], wanted)
            parts.append(BlockRows(block, rows, places))
        try:
            batch = self._format.take(parts, len(indices))
        except Exception as error:
            self._raise_for_row(parts, indices, error)
            raise
        if self._path_values:
            numbers = np.searchsorted(self._file_starts, indices, side="right") - 1
            values = {name: each for name, each in self._path_values.items() if name not in batch}
            batch = {**batch, **taken([BlockRows(values, numbers, slice(None))], len(indices))}
        return batch if self._mapped is None else self._mapped(batch)

    def _raise_for_row(self, parts: Sequence[BlockRows], indices: np.ndarray, error: Exception) -> None:
        """Raise the error of the first row that cannot be parsed alone, with the name of its file."""
        for block, rows, places in parts:
            for row, place in zip(_as_array(rows), _as_array(places), strict=True):
                try:
                    self._format.take([BlockRows(block, np.array([row]), np.array([0]))], 1)
                except Exception as cause:
                    f = int(np.searchsorted(self._file_starts, indices[place], side="right")) - 1
                    (number,) = self.layouts[f].record_numbers(indices[[place]] - self._file_starts[f])
                    where = f"{self.files[f].url}: row {number} (the first is 0) cannot be parsed"
                    raise DataError(f"{where}: {type(cause).__name__}: {cause}") from error

    def batch_spec(self, rows: int | None) -> Nest:
        """Return the ``tf.TypeSpec`` structure of a batch of ``rows`` rows; None for any number."""
        import tensorflow as tf

        def spec(leaf: np.ndarray | tf.RaggedTensor | tf.SparseTensor) -> tf.TypeSpec:
            if isinstance(leaf, tf.RaggedTensor):
                shape = [rows, *leaf.shape[1:]]
                return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
            if isinstance(leaf, tf.SparseTensor):
                return tf.SparseTensorSpec([rows, *[None] * (leaf.shape.rank - 1)], leaf.dtype)
            return tf.TensorSpec([rows, *leaf.shape[1:]], tf.convert_to_tensor(leaf).dtype)

        return tf.nest.map_structure(spec, self.structure)

    def fingerprint(self) -> dict[str, object]:
        """Return the number of rows, the columns, and a digest of all files' names, sizes and rows."""
        return {"examples": self.examples, "arrays": {"files": columns_of(self.structure)}, "rows": self.digest()}

    def identity(self, shuffle: Shuffle) -> dict[str, object]:
        """Return what determines the global order in addition to the seed and sizes."""
        return {"shuffle": shuffle.mode, "interleave": shuffle.lanes, "files": self.digest()}

    def digest(self) -> int:
        """Return a digest of the files' sizes and rows. Their folders may differ between hosts and runs."""
        names = [(name, file.size) for name, (file, _) in self._files.items()]
        hasher = xxhash.xxh3_64(f"({names}, [".encode())
        for i in range(0, len(self._block_starts), _DIGESTED_AT_ONCE):
            part = str(self._block_starts[i : i + _DIGESTED_AT_ONCE].tolist())[1:-1]
            hasher.update(f"{', ' if i else ''}{part}".encode())
        hasher.update(b"])")
        return hasher.intdigest()

    def _load(self, block: int) -> Block:
        number = int(np.searchsorted(self._first_blocks, block, side="right")) - 1
        return self._format.load(self.files[number], self.layouts[number], block - int(self._first_blocks[number]))


def _pieces(indices: np.ndarray, starts: np.ndarray) -> Iterator[tuple[int, _Rows, _Rows]]:
    """Yield the number of each block or file with some of ``indices``, their rows in it, and their places in the batch.

    ``starts`` has the first row of each block, and the end of the last.
    """
    run = _slice_if_run(indices)
    if isinstance(run, slice):  # in order, this takes less time than the copy of the rows
        first = run.start
        number = int(np.searchsorted(starts, run.start, side="right")) - 1
        while first < run.stop:
            start = int(starts[number])
            stop = min(run.stop, int(starts[number + 1]))
            if first < stop:
                yield number, slice(first - start, stop - start), slice(first - run.start, stop - run.start)
            first = stop
            number = number + 1
        return
    places = np.argsort(indices, kind="stable")
    ascending = indices[places]
    found = np.searchsorted(starts, ascending, side="right") - 1
    changes = np.flatnonzero(np.diff(found)) + 1
    for each, rows in zip(np.split(places, changes), np.split(ascending, changes), strict=True):
        number = int(np.searchsorted(starts, rows[0], side="right")) - 1
        yield number, _slice_if_run(rows - starts[number]), _slice_if_run(each)


def _slice_if_run(rows: np.ndarray) -> _Rows:
    """Return rows that follow each other as a slice, others unchanged."""
    first = int(rows[0])
    last = int(rows[-1]) + 1
    return slice(first, last) if last - first == len(rows) and (np.diff(rows) == 1).all() else rows


def _as_array(rows: _Rows) -> np.ndarray:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


class EpochReader(NamedTuple):
    """Reads the examples of an epoch.

    Attributes:
        read: Returns the examples ``indices``, int64 ``[m]``. Called by several threads at once.
        next_batch: Called after each batch, to drop what is not needed any more.
    """

    read: Callable[[np.ndarray], Nest]
    next_batch: Callable[[], None] = lambda: None
