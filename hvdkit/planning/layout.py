"""Where the rows of every table stand on every rank.

Tables of one width, dtype and optimizer share one variable, one below the other, so that any number of tables costs one
lookup and one update for each width. A row is known to all ranks by a single number, its *key*:

    key = local * N + rank            (rank = key mod N,  local = key div N)

with ``local`` the row of that rank's variable. Looking up needs no more than the key, whatever rule placed the row.

A table that evicts has a variable of its own. Which row an id has changes; the bucket of rows in which it stands does
not, nor the rank of the bucket. One more row, behind all others, is nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvdkit.partition import rows_of
from hvdkit.planning.table import BUCKET, DTYPES, Table


@dataclass(frozen=True)
class Slice:
    """Some columns of a table, all of its rows placed by one rule.

    Attributes:
        table: the table.
        columns: which of its columns.
        rule: "mod", "div", "bucket" (as "div", but by whole buckets), or "whole": all rows on one rank.
        rank: of "whole", that rank.
        base: the first row of the variable that holds some of it: the same on all ranks that do.
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
            held = rows_of("div", self.table.buckets, rank, size)
            return range(held.start * BUCKET, held.stop * BUCKET)
        return rows_of(self.rule, self.table.input_dim, rank, size)


class Held(NamedTuple):
    """What one rank holds of a table in a group's variable."""

    table: Table
    rows: range
    columns: range
    base: int


@dataclass
class Group:
    """Slices of one width and dtype, which share a variable.

    Attributes:
        width: numbers in a row.
        dtype: their dtype.
        rows: rows of each rank's variable.
        slices: in the order in which they were placed.
        host: whether it stays in the host's memory.
        evicts: the table that evicts, whose alone it is then.
        optimizer: its tables' own Keras optimizer, or None.
    """

    width: int
    dtype: str
    rows: list[int]
    slices: list[Slice] = field(default_factory=list)
    host: bool = False
    evicts: Table | None = None
    optimizer: Any = None

    @property
    def keys(self) -> int:
        """One more than the largest key."""
        return 2**63 if self.evicts is not None else max(self.rows) * len(self.rows)

    def held(self, rank: int) -> list[Held]:
        """Return what ``rank`` holds of each table, in an order that all ranks share; it may be nothing."""
        found: dict[str, Held] = {}
        for part in self.slices:
            rows = part.rows(rank, len(self.rows))
            if rows or part.table.name not in found:
                found[part.table.name] = Held(part.table, rows, part.columns if rows else range(0), part.base)
        return list(found.values())


@dataclass(frozen=True)
class Layout:
    """All groups, and which slices make up each table.

    Attributes:
        size: number of ranks.
        groups: the sharded tables' variables.
        slices: of each sharded table, its slices from left to right, each with its group's number.
        replicated: tables that every rank holds whole.
    """

    size: int
    groups: tuple[Group, ...]
    slices: Mapping[str, tuple[tuple[int, Slice], ...]]
    replicated: tuple[Table, ...]

    @property
    def keys(self) -> int:
        """One more than the largest key of any group."""
        return max((group.keys for group in self.groups), default=0)


def lay_out(tables: Sequence[Table], placements: Mapping[str, str], size: int) -> Layout:
    """Place every table.

    Row-sharded tables come first, since their rows stand at the same place on every rank. Columns are cut into runs of
    equal width (the last may be shorter, and its rows are filled up), run r for rank r. Whole tables then go to the
    rank that has the fewest bytes so far, the largest first.

    Args:
        tables: in any order; all ranks pass the same.
        placements: of each table "row" (round robin), "div" (contiguous rows), "column", "table" or "replicated".
        size: number of ranks.

    Example:
        >>> layout = lay_out([Table("a", 5, 2), Table("b", 3, 2)], {"a": "row", "b": "table"}, 2)
        >>> layout.groups[0].rows, [s.base for s in layout.groups[0].slices]
        ([3, 5], [0, 2])
    """
    groups: dict[tuple[int, str, bool, str, str], Group] = {}
    placed: dict[str, list[tuple[int, Slice]]] = {}

    def add(table: Table, width: int, columns: range, rule: str, rank: int = 0) -> None:
        alone = table if table.evict else None
        key = (width, table.dtype, table.host, table.name if alone else "", table.optimizer_key)
        group = groups.setdefault(key, Group(width, table.dtype, [0] * size, [], table.host, alone, table.optimizer))
        part = Slice(table, columns, rule, group.rows[rank] if rule == "whole" else max(group.rows), rank)
        for r in range(size):
            if rows := len(part.rows(r, size)):
                group.rows[r] = part.base + rows
            group.rows[r] += alone is not None
        group.slices.append(part)
        placed.setdefault(table.name, []).append((list(groups).index(key), part))

    for table in tables:
        if (how := placements[table.name]) in ("row", "div"):
            rule = "bucket" if table.evict else "mod" if how == "row" else "div"
            add(table, table.output_dim, range(table.output_dim), rule)
    for table in tables:
        if placements[table.name] == "column":
            width = -(-table.output_dim // size)
            for rank, first in enumerate(range(0, table.output_dim, width)):
                add(table, width, range(first, min(first + width, table.output_dim)), "whole", rank)
    for table in sorted(tables, key=lambda t: -t.bytes):
        if placements[table.name] == "table":
            held = [sum(g.rows[rank] * g.width * DTYPES[g.dtype] for g in groups.values()) for rank in range(size)]
            add(table, table.output_dim, range(table.output_dim), "whole", held.index(min(held)))
    replicated = tuple(t for t in tables if placements[t.name] == "replicated")
    return Layout(size, tuple(groups.values()), {n: tuple(parts) for n, parts in placed.items()}, replicated)
