"""``hvdkit data``: what data files have, and how many ranks they feed well. Runs in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from tyro.conf import Positional, arg, subcommand

from hvdkit.commands.progress_bar import byte_progress
from hvdkit.errors import describe, integer, printable
from hvdkit.machine.terminal import aligned

if TYPE_CHECKING:
    from hvdkit.data.files.formats import Format
    from hvdkit.data.files.listing import File
    from hvdkit.data.files.source import FileSource

Kind = Literal["auto", "parquet", "tfrecord", "array_record", "npy", "lines"]
_BLOCKS_PER_RANK = 10  # a rank reads at most one block more than its part: 10 %
_LARGE_BLOCK = 128 * 2**20  # bytes


@dataclass(frozen=True, kw_only=True)
class InspectFiles:
    """Show rows, columns and blocks of data files, and how many ranks they feed well.

    Records and lines are found as `hvdkit data index` does. Exit code: 0; 1 with a remedy, if the files feed fewer
    ranks well than --ranks; 2 if they cannot be read.

    For example:
        hvdkit data inspect clicks/ --ranks 64
        hvdkit data inspect 'logs/day_*' --json

    See `hvdkit docs data#files`.
    """

    paths: Positional[Annotated[tuple[str, ...], arg(metavar="PATHS")]]
    """Files, folders, patterns or URLs."""
    format: Kind = "auto"
    """Format of the files; auto recognizes it from their first bytes."""
    ranks: int = 1
    """Number of ranks that will read the files."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class IndexFiles:
    """Find the offsets of records or lines, and keep them next to the data or in the user's cache.

    Programs do this when they open the files; this command does it before a job starts. Parquet, ArrayRecord and .npy
    files contain an index. With on_error="skip", a program also looks for damaged records, when it first opens the
    files. Exit code: 0, with a warning if the offsets could not be kept; 2 if a file cannot be read.

    For example:
        hvdkit data index 'images/train-*'

    See `hvdkit docs data#files`.
    """

    paths: Positional[Annotated[tuple[str, ...], arg(metavar="PATHS")]]
    """Files, folders, patterns or URLs."""
    format: Kind = "auto"
    """Format of the files; auto recognizes it from their first bytes."""


Data = Annotated[InspectFiles, subcommand("inspect")] | Annotated[IndexFiles, subcommand("index")]


@dataclass(frozen=True)
class Report:
    """What ``hvdkit data inspect`` shows. Sizes are in bytes."""

    format: str
    files: int
    size: int
    rows: int
    columns: str
    blocks: int
    block_rows: int  # the median
    largest_block: int
    ranks: int  # up to which each reads at most 10 % more than its part
    remedies: list[str]

    def __str__(self) -> str:
        from rich.filesize import decimal

        rows = [
            ("files", f"{self.files:,} ({self.format}), {decimal(self.size)}"),
            ("rows", f"{self.rows:,}"),
            ("columns", printable(self.columns)),
            ("blocks", f"{self.blocks:,} of {self.block_rows:,} rows (median), at most {decimal(self.largest_block)}"),
            ("ranks", f"up to {self.ranks:,} read at most 10 % more than their part with shuffle='blocks'"),
        ]
        return "\n".join([*aligned(rows), *self.remedies])


def data(config: InspectFiles | IndexFiles) -> int:
    """Run ``hvdkit data ...``, print on stdout, and return the exit code."""
    ranks = integer("--ranks", config.ranks, minimum=1) if isinstance(config, InspectFiles) else 1
    source = _scanned(config.paths, config.format)
    if isinstance(config, IndexFiles):
        print(source)
        if not source.needs_index:
            print(f"nothing to keep: {source.format_name} files contain an index")
        return 0
    report = examine(source, ranks)
    print(json.dumps(asdict(report), indent=2) if config.json else report)
    return 1 if report.remedies else 0


def examine(source: FileSource, ranks: int) -> Report:
    """Return the report about a source."""
    from rich.filesize import decimal

    block_rows = np.array([rows for layout in source.layouts for rows in layout.block_rows])
    largest = max(layout.largest_block for layout in source.layouts)
    fed = max(1, len(block_rows) // _BLOCKS_PER_RANK)
    remedies = []
    if fed < ranks:
        remedy = "pass shuffle='full', which reads single rows"
        if not source.reads_rows:
            rows = max(1, source.examples // (ranks * _BLOCKS_PER_RANK))
            remedy = f"write row groups of at most {rows:,} rows"
        remedies.append(f"too few blocks for {ranks} ranks: {remedy}")
    if not source.reads_rows and largest > _LARGE_BLOCK:
        fitting = max(1, int(block_rows.max() * _LARGE_BLOCK / largest))
        remedies.append(f"blocks of {decimal(largest)}: each rank holds several; write row groups of {fitting:,} rows")
    return Report(
        format=source.format_name,
        files=len(source.files),
        size=sum(file.size for file in source.files),
        rows=source.examples,
        columns=source.kind,
        blocks=len(block_rows),
        block_rows=int(np.median(block_rows)),
        largest_block=largest,
        ranks=fed,
        remedies=remedies,
    )


def _scanned(paths: tuple[str, ...], kind: Kind) -> FileSource:
    """Return a source; scanning its files has a progress bar."""
    from hvdkit.data.files.listing import list_files
    from hvdkit.data.files.source import FileSource

    if not paths:
        raise ValueError(describe("paths", "none", "at least one", "pass e.g. a folder"))
    files = list_files(paths)
    file_format = _format_of(_recognized(files) if kind == "auto" else kind)
    size = sum(file.size for file in files)
    with byte_progress("reading", size) as advance:
        return FileSource(paths, file_format, on_scanned=lambda file: advance(file.size))


def _format_of(kind: Kind) -> Format:
    from hvdkit.data.files import needs_extra

    with needs_extra():
        from hvdkit.data.files.array_record_format import ArrayRecordFormat
        from hvdkit.data.files.npy_format import NpyFormat
        from hvdkit.data.files.parquet_format import ParquetFormat
        from hvdkit.data.files.text_format import LineFormat
        from hvdkit.data.files.tfrecord_format import TFRecordFormat

    formats: dict[str, Format] = {
        "parquet": ParquetFormat(None, {}),
        "tfrecord": TFRecordFormat(None),
        "array_record": ArrayRecordFormat(None),
        "npy": NpyFormat(),
        "lines": LineFormat(),
    }
    return formats[kind]


def _recognized(files: Sequence[File]) -> Kind:
    """Return the format of files, which must be the same for all.

    Raises:
        ValueError: The files have different formats.
        DataError: A file cannot be opened.
    """
    from hvdkit.data.files.reading_ahead import in_threads

    some = [file for file in files if file.size] or files[:1]
    kinds = in_threads(_format_of_file, some)
    for file, kind in zip(some, kinds, strict=True):
        if kind != kinds[0]:
            got = f"{kind} in {file.url}"
            expected = f"{kinds[0]}, as in {some[0].url}"
            raise ValueError(describe("paths", got, expected, "pass --format, or a pattern for some of the files"))
    return kinds[0]


def _format_of_file(file: File) -> Kind:
    """Return the format of a file, from its first bytes."""
    from hvdkit.data.files.filesystems import filesystem_of, retrying
    from hvdkit.data.files.storage import naming_errors
    from hvdkit.data.files.tfrecord_format import is_header

    filesystem, name = filesystem_of(file.url)
    with naming_errors(file):
        start = retrying(filesystem, filesystem.cat_file, name, start=0, end=12)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith(b"\x93NUMPY"):
        return "npy"
    if start.startswith(b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"):  # Riegeli's, the format that ArrayRecord extends
        return "array_record"
    return "tfrecord" if is_header(start) else "lines"
