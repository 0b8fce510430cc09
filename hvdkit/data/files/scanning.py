"""Finds the files of a source and what they have: all ranks together, each scanning a part of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import optree
import xxhash

from hvdkit import cluster
from hvdkit.cluster import agreement
from hvdkit.cluster.logs import get_logger
from hvdkit.data.aligned import Nest
from hvdkit.data.files import remote_cache
from hvdkit.data.files.formats import FileLayout, Format, OnError
from hvdkit.data.files.listing import File, Paths, list_files, names_of
from hvdkit.data.files.reading_ahead import in_threads
from hvdkit.errors import DataError, printable


class ScannedFile(NamedTuple):
    """A file, and what it has."""

    file: File
    layout: FileLayout


class Scan(NamedTuple):
    """What to look for. All ranks must pass the same.

    Attributes:
        paths: The user's paths.
        file_format: The format of the files.
        on_error: How to treat files and records that are damaged.
        arguments: The other arguments of the user's call, compared across ranks.
        on_scanned: Called after each file that this rank has scanned.
    """

    paths: Paths
    file_format: Format
    on_error: OnError
    arguments: Mapping[str, object]
    on_scanned: Callable[[File], None]

    def files(self, known: Mapping[str, ScannedFile]) -> dict[str, ScannedFile]:
        """Return the files by their names. Each rank scans a part of those that are not ``known``. A collective.

        An error on one rank is a DataError on the others; ranks that see other files, or passed other arguments, raise
        CollectiveMismatchError.
        """
        files: dict[str, File] = {}

        def listed() -> tuple[dict[str, str], int, list[str]]:
            remote_cache.limit()  # an error in the settings should not come after the first download
            found = list_files(self.paths, self.file_format.suffixes)
            files.update(zip(names_of(self.paths, found), found, strict=True))
            unknown = [name for name, file in files.items() if name not in known or known[name].file != file]
            return self._shown_arguments(), digest(_names_and_sizes(files)), unknown

        if cluster.is_initialized():
            exchange = cluster.exchange()
            rank = cluster.rank()
            size = cluster.size()
            ranks = agreement.gather(exchange, "a list of data files", listed, error=DataError)
            for name in ranks[0][0]:
                passed = [arguments.get(name, "nothing") for arguments, _, _ in ranks]
                agreement.compare(passed, name, "pass the same on every rank", show=lambda odd, usual: (odd, usual))
            if len({each for _, each, _ in ranks}) > 1:
                names = agreement.gather(exchange, "names of data files", lambda: _names_and_sizes(files))
                agreement.compare(names, "paths", "let every host see the same files", show=_first_difference)
            to_scan = ranks[0][2]
            parts = agreement.gather(
                exchange,
                "the rows of data files",
                lambda: in_threads(self._scan, [files[name] for name in to_scan[rank::size]]),
                error=DataError,
            )
            layouts = {name: parts[i % size][i // size] for i, name in enumerate(to_scan)}
        else:
            to_scan = listed()[2]
            layouts = dict(zip(to_scan, in_threads(self._scan, [files[name] for name in to_scan]), strict=True))
        if not cluster.is_initialized() or cluster.is_chief():
            _report({files[name].url: layout for name, layout in layouts.items()})
        return {name: ScannedFile(file, layouts.get(name) or known[name].layout) for name, file in files.items()}

    def _scan(self, file: File) -> FileLayout:
        try:
            layout = self.file_format.scan(file)
        except DataError as error:
            if self.on_error == "raise":
                raise
            layout = FileLayout([], "", 0, problem=str(error))
        self.on_scanned(file)
        return layout

    def _shown_arguments(self) -> dict[str, str]:
        """Return texts that are the same on ranks that passed the same; of a function, its name."""

        def shown(value: object) -> str:
            return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)

        arguments = {"function": self.file_format.name, "on_error": self.on_error, **self.arguments}
        return {name: shown(value) for name, value in arguments.items()}


def agree_on_columns(first_batch: Callable[[], Nest]) -> Nest:
    """Return ``first_batch()``, after comparing the names, types and numbers of axes across ranks. A collective."""
    if not cluster.is_initialized():
        return first_batch()
    what = "the first row of data files"
    batch, ranks = agreement.run_and_describe(cluster.exchange(), what, first_batch, columns_of, error=DataError)
    agreement.compare(ranks, what, "pass the same columns= or parse= on every rank")
    return batch


def columns_of(batch: Nest) -> str:
    """Return the names, types and numbers of axes of a batch."""

    def column(leaf: object) -> str:
        return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{len(getattr(leaf, 'shape', ())) * '[]'}"

    return str(optree.tree_map(column, batch))


def digest(value: object) -> int:
    """Return a digest of what ``repr`` shows of a value."""
    return xxhash.xxh3_64_intdigest(repr(value).encode())


def _names_and_sizes(files: Mapping[str, File]) -> list[tuple[str, int]]:
    return [(name, file.size) for name, file in files.items()]


def _report(layouts: Mapping[str, FileLayout]) -> None:
    """Warn the user of what is skipped, and of files that may be cut."""
    for url, layout in layouts.items():
        if layout.problem:
            get_logger().warning("on_error='skip': skipped the file %s", printable(f"{url}: {layout.problem}"))
        elif len(layout.damaged):
            get_logger().warning("on_error='skip': skipped %d record(s) of %s", len(layout.damaged), printable(url))
    if urls := [url for url, layout in layouts.items() if layout.is_open]:
        others = f" and {len(urls) - 1} other file(s)" if len(urls) > 1 else ""
        get_logger().warning(
            "%s%s: the last line has no line end, and may be cut; expect_final_newline=True makes this an error",
            printable(urls[0]),
            others,
        )


def _first_difference(odd: list[tuple[str, int]], usual: list[tuple[str, int]]) -> tuple[str, str]:
    index = agreement.differing_indices(odd, usual)[0]
    got, expected = (
        f"{each[index][0]} of {each[index][1]} bytes" if index < len(each) else "no further file"
        for each in (odd, usual)
    )
    return got, expected
