"""Columns whose values are in the folders of files, such as ``year=2024/month=07/part-0.parquet``.

Hive, Spark and pyarrow write tables in this way and leave these columns out of the files. As in pyarrow, they are int32
if all values are, otherwise text, and missing if the folder is ``__HIVE_DEFAULT_PARTITION__``.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from hvdkit.data.files.columns import to_numpy
from hvdkit.errors import describe

_MISSING = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?\d{1,10}", re.ASCII)


def columns_in(path: str) -> dict[str, str | None]:
    """Return the columns in the folders of a path, and their values.

    Example:
        >>> columns_in("year=2024/shop=a%20b/part-0.parquet")
        {'year': '2024', 'shop': 'a b'}
    """
    pairs = [folder.split("=", 1) for folder in path.split("/")[:-1] if "=" in folder]
    decoded = {urllib.parse.unquote(name): urllib.parse.unquote(value) for name, value in pairs if name}
    return {name: None if value == _MISSING else value for name, value in decoded.items()}


class PathColumns:
    """The columns in the folders of a source's files, which must be the same for all files.

    Args:
        columns: Those that the user requested; None for all.
        fill: The value that replaces missing values, for each column that may have some.
        names: The names of all files, relative to the paths that the user passed.
    """

    def __init__(self, columns: Sequence[str] | None, fill: Mapping[str, object], names: Sequence[str]):
        first = columns_in(names[0])
        self.names = [name for name in first if columns is None or name in columns]
        self._requested = columns
        self._fill = dict(fill)
        values = self._texts(names)
        self._types = {name: pa.int32() if _are_int32(values[name]) else pa.string() for name in self.names}

    def kinds(self) -> list[str]:
        """Return the columns and types as text."""
        return [f"{name}: {kind}" for name, kind in self._types.items()]

    def values(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the value of each file, int32 or bytes ``[files]``; of the same types as those of the first files."""
        arrays = {}
        for name, texts in self._texts(names).items():
            kind = self._types[name]
            if pa.types.is_integer(kind):
                for each, text in zip(names, texts, strict=True):
                    if text is not None and not _are_int32([text]):
                        remedy = "start again with all files, which makes the column text"
                        raise ValueError(describe(f"column {name!r} of {each}", text, "an int32", remedy))
            array = pa.array([text if text is None or kind != pa.int32() else int(text) for text in texts], kind)
            try:
                arrays[name] = np.asarray(to_numpy(pa.chunked_array([array]), self._fill.get(name)))
            except TypeError as error:
                where = f"column {name!r} of {names[texts.index(None)] if None in texts else names[0]}"
                remedy = f"pass fill={{{name!r}: value}}, or leave it out with columns="
                raise TypeError(describe(where, str(error), "a value in each folder", remedy)) from None
        return arrays

    def require_all(self, structure: Mapping[str, object]) -> None:
        """Raise ValueError if a requested column is neither in the files nor in their folders below the paths."""
        if missing := [name for name in self._requested or () if name not in structure]:
            remedy = f"pass the folder above e.g. {missing[0]}=... as the path"
            raise ValueError(
                describe("columns", missing, "columns of the files, or of folders below the paths", remedy)
            )

    def _texts(self, names: Sequence[str]) -> dict[str, list[str | None]]:
        found = [columns_in(each) for each in names]
        for each, columns in zip(names, found, strict=True):
            requested = [name for name in columns if self._requested is None or name in self._requested]
            if requested != self.names:
                got = f"{requested} in {each}"
                expected = f"{self.names}, as in {names[0]}"
                remedy = "pass one such table, or leave the columns out with columns="
                raise ValueError(describe("columns in folders", got, expected, remedy))
        return {name: [columns[name] for columns in found] for name in self.names}


def _are_int32(texts: Sequence[str | None]) -> bool:
    """Return whether the values that are not missing are int32, and there are some."""
    known = [text for text in texts if text is not None]
    limits = np.iinfo(np.int32)
    return all(_INTEGER.fullmatch(text) and limits.min <= int(text) <= limits.max for text in known) and bool(known)
