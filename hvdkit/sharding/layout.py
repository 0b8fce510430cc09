"""The layout of tables in memory: the position of every table's rows on every rank.

Tables with the same width, dtype and optimizer are stacked in one variable, so any number of tables costs one lookup
and one update per width. All ranks identify a row by a single number, its *key*:

    key = local * N + rank            (rank = key mod N,  local = key div N)

where ``local`` is the row in that rank's variable. A lookup needs only the key, regardless of the row's placement rule.

A table with eviction has a separate variable. An id may move between rows, but its bucket of rows and the bucket's rank
are fixed. The variable has one additional, unused row at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hvdkit.sharding.partition import rows_of
from hvdkit.sharding.table import BUCKET, DTYPES, Table

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class TableSlice:
    """A range of a table's columns, whose rows are all placed by one rule.

    Attributes:
        table: the table.
        columns: its columns.
        rule: "mod", "div", "bucket" (like "div", but by whole buckets), or "whole": all rows on one rank.
        rank: the rank, for rule "whole".
        base: the slice's first row in the variable, the same on all ranks that hold a part of it.
    """

    table: Table
    columns: range
    rule: str
    base: int
    rank: int = 0

    def rows(self, rank: int, size: int) -> range:
        """Return the table's rows that ``rank`` of ``size`` holds."""
        if self.rule == "whole":
            return range(self.table.input_dim if rank == self.rank else 0)
        if self.rule == "bucket":
            buckets = rows_of("div", self.table.buckets, rank, size)
            return range(buckets.start * BUCKET, buckets.stop * BUCKET)
        return rows_of(self.rule, self.table.input_dim, rank, size)


@dataclass
class TableGroup:
    """Slices of the same width and dtype, stacked in one variable.

    Attributes:
        width: number of columns.
        dtype: dtype of the variable.
        rows: number of rows of each rank's variable.
        slices: the slices, in order of placement.
        host: whether the variable is in host memory.
        evicts: the table with eviction if the variable belongs to one, or None.
        optimizer: the tables' Keras optimizer, or None for the model's.
    """

    width: int
    dtype: str
    rows: list[int]
    slices: list[TableSlice] = field(default_factory=list)
    host: bool = False
    evicts: Table | None = None
    optimizer: keras.optimizers.Optimizer | None = None

    @property
    def keys(self) -> int:
        """One more than the largest key."""
        return 2**63 if self.evicts is not None else max(self.rows) * len(self.rows)

    def parts_on(self, rank: int) -> list[tuple[TableSlice, range]]:
        """Return each table's columns on ``rank``, and their rows, possibly none, in an order that all ranks share."""
        parts: dict[str, tuple[TableSlice, range]] = {}
        for table_slice in self.slices:
            rows = table_slice.rows(rank, len(self.rows))
            if rows or table_slice.table.name not in parts:
                held = table_slice if rows else replace(table_slice, columns=range(0))
                parts[table_slice.table.name] = held, rows
        return list(parts.values())


@dataclass(frozen=True)
class Layout:
    """The variables of all tables.

    Attributes:
        size: number of ranks.
        groups: the sharded tables' variables.
        replicated: tables that are replicated on every rank.
    """

    size: int
    groups: tuple[TableGroup, ...]
    replicated: tuple[Table, ...]

    @property
    def keys(self) -> int:
        """One more than the largest key of any group."""
        return max((group.keys for group in self.groups), default=0)


def lay_out(tables: Sequence[Table], placements: Mapping[str, str], size: int) -> Layout:
    """Lay out every table.

    Row-sharded tables come first, because their rows have the same offset on every rank. Columns are split into ranges
    of equal width (the last may be shorter, and is padded), range r for rank r. Unsharded tables are then assigned to
    the rank with the fewest bytes so far, largest first.

    Args:
        tables: the tables, in any order that is the same on all ranks.
        placements: for each table "row" (round robin), "div" (contiguous rows), "column", "table" or "replicated".
        size: number of ranks.

    Example:
        >>> layout = lay_out([Table("a", 5, 2), Table("b", 3, 2)], {"a": "row", "b": "table"}, 2)
        >>> layout.groups[0].rows, [s.base for s in layout.groups[0].slices]
        ([3, 5], [0, 2])
    """
    groups: dict[tuple[int, str, bool, str, str], TableGroup] = {}

    def add(table: Table, width: int, columns: range, rule: str, rank: int = 0) -> None:
        evicting = table if table.evict else None
        key = (width, table.dtype, table.host, table.name if evicting else "", table.optimizer_key)
        group = groups.setdefault(
            key, TableGroup(width, table.dtype, [0] * size, [], table.host, evicting, table.optimizer)
        )
        table_slice = TableSlice(table, columns, rule, group.rows[rank] if rule == "whole" else max(group.rows), rank)
        for r in range(size):
            if rows := len(table_slice.rows(r, size)):
                group.rows[r] = table_slice.base + rows
            group.rows[r] += evicting is not None
        group.slices.append(table_slice)

    for table in tables:
        if (placement := placements[table.name]) in ("row", "div"):
            rule = "bucket" if table.evict else "mod" if placement == "row" else "div"
            add(table, table.output_dim, range(table.output_dim), rule)
    for table in tables:
        if placements[table.name] == "column":
            width = -(-table.output_dim // size)
            for rank, first in enumerate(range(0, table.output_dim, width)):
                add(table, width, range(first, min(first + width, table.output_dim)), "whole", rank)
    for table in sorted(tables, key=lambda t: -t.bytes):
        if placements[table.name] == "table":
            nbytes = [sum(g.rows[rank] * g.width * DTYPES[g.dtype] for g in groups.values()) for rank in range(size)]
            add(table, table.output_dim, range(table.output_dim), "whole", nbytes.index(min(nbytes)))
    replicated = tuple(t for t in tables if placements[t.name] == "replicated")
    return Layout(size, tuple(groups.values()), replicated)
