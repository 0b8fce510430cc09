"""Plan a placement of tables that fits into memory, and count the bytes on every rank.

All figures are for one rank, with V rows of D numbers of b bytes, S slots, N ranks, and k the rows that one example
looks up in the table:

    weights     (rows held) * (columns held) * b, plus 17 per row of a table with eviction: id, last use, new or not
    slots       S * (rows held) * (columns held) * b; with a per-table optimizer, S is that optimizer's
    host        weights and slots of the tables in host memory, which are not included above
    gradients   the rows that one step updates at their owner, at most min(rows held, N * batch * k) * D * b; with an
                optimizer that updates entire shards, twice the rows held: their gradient and temporary memory
    exchange    bytes sent and received per step: ids once and rows twice, batch * k * (i + 2 * D * b), i = 4 or 8

``batch`` is the batch size of one rank. The last two are upper bounds: repeated ids are sent once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdkit.errors import PlanError, describe, integer
from hvdkit.machine.terminal import aligned
from hvdkit.sharding.layout import Layout, lay_out
from hvdkit.sharding.table import DTYPES, PLACEMENTS, Table, check_tables

if TYPE_CHECKING:
    import keras

# Optimizers that update the entire shard, not only the gradient's rows (``sparse_updates="auto"``).
WHOLE_SHARDS = ("momentum", "rmsprop", "ftrl")
# Slots per table element. FTRL has an accumulator and a linear term.
SLOTS = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2, "rmsprop": 1, "ftrl": 2, "amsgrad": 3}
_EVICTING_BYTES = 8 + 8 + 1
# Averaging a dense gradient up to this size is cheaper than routing rows.
REPLICATED_BYTES = 64 * 1024


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank, by purpose."""

    weights: int
    slots: int
    gradients: int
    exchange: int
    host: int = 0

    @property
    def total(self) -> int:
        """All of them except ``host``: the memory needed on the GPU, if there is one."""
        return self.weights + self.slots + self.gradients + self.exchange


@dataclass(frozen=True)
class Plan:
    """The placement of every table, and its memory. Its ``str()`` is a table.

    Attributes:
        tables: the tables.
        size: number of ranks.
        placements: for each table "row", "div", "column", "table" or "replicated".
        ranks: bytes of each rank.
        memory_bytes: the memory limit, or None.
    """

    tables: tuple[Table, ...]
    size: int
    placements: Mapping[str, str]
    ranks: tuple[RankBytes, ...]
    memory_bytes: int | None = None

    def __str__(self) -> str:
        tables = [
            (t.name, f"{t.input_dim:,}", str(t.output_dim), format_bytes(t.bytes), self.placements[t.name])
            for t in self.tables
        ]
        names = ["weights", "slots", "gradients", "exchange", "total"]
        names += ["host"] if any(b.host for b in self.ranks) else []
        ranks = [(str(rank), *(format_bytes(getattr(b, name)) for name in names)) for rank, b in enumerate(self.ranks)]
        lines = aligned([("table", "rows", "width", "whole", "placement"), *tables], right=(1, 2, 3))
        lines += ["", *aligned([("rank", *names), *ranks], right=range(len(names) + 1))]
        if self.memory_bytes is not None:
            lines.append(f"limit {format_bytes(self.memory_bytes)} per rank")
        return "\n".join(lines)


def format_bytes(count: float) -> str:
    """Return a human-readable number of bytes.

    Example:
        >>> format_bytes(1536)
        '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def plan_tables(
    tables: Sequence[Table],
    size: int,
    *,
    memory_bytes: int | None = None,
    optimizer: str = "sgd",
    batch_size: int = 1024,
    ids_per_example: int = 1,
    placements: Mapping[str, str] | None = None,
) -> Plan:
    """Choose a placement for every table, and check before anything is allocated that it fits into memory.

    Tables of at most 64 KiB are replicated, so that their gradients are sent with the dense ones. All others are
    sharded by rows, round robin: every rank holds an equal part of each, regardless of the distribution of ids. If the
    memory limit requires it, replicated tables are sharded as well, and tables with fewer rows than ranks by columns.

    Args:
        tables: the tables.
        size: number of ranks.
        memory_bytes: memory limit of one rank; None for unlimited.
        optimizer: "sgd", "momentum", "adagrad", "adam", "amsgrad", "rmsprop" or "ftrl".
        batch_size: examples per batch on each rank.
        ids_per_example: rows that an example looks up in each feature.
        placements: explicit placements of some tables; the planner chooses the others.

    Returns:
        The plan; ``print`` it.

    Raises:
        PlanError: no placement fits; the message names the fullest rank and the bytes that it needs.
        ValueError, TypeError: an argument is out of range.

    Examples:
        >>> import hvdkit as hk
        >>> tables = [hk.layers.Table("items", 10_000_000, 64), hk.layers.Table("tags", 100, 16)]
        >>> print(hk.plan_tables(tables, 2, optimizer="adagrad", batch_size=4096))
        table        rows  width    whole  placement
        items  10,000,000     64  2.4 GiB  row
        tags          100     16  6.2 KiB  replicated
        <BLANKLINE>
        rank  weights    slots  gradients  exchange    total
           0  1.2 GiB  1.2 GiB    2.0 MiB   2.0 MiB  2.4 GiB
           1  1.2 GiB  1.2 GiB    2.0 MiB   2.0 MiB  2.4 GiB
    """
    table_tuple = check_tables(tables)
    size = integer("size", size, minimum=1)
    batch = integer("batch_size", batch_size, minimum=1) * integer("ids_per_example", ids_per_example, minimum=1)
    if optimizer not in SLOTS:
        raise ValueError(describe("optimizer", optimizer, f"one of {sorted(SLOTS)}", "pass its name"))
    if memory_bytes is not None:
        memory_bytes = integer("memory_bytes", memory_bytes, minimum=1)
    explicit = _checked_placements(placements or {}, table_tuple)
    for limit, min_rows in ((REPLICATED_BYTES, 0), (0, 0), (0, size)):  # shard tiny tables only if memory requires it
        chosen = {t.name: explicit.get(t.name) or _choose_placement(t, limit, min_rows) for t in table_tuple}
        ranks = _count(lay_out(table_tuple, chosen, size), optimizer, batch)
        plan = Plan(table_tuple, size, chosen, ranks, memory_bytes)
        if memory_bytes is None or max(b.total for b in ranks) <= memory_bytes:
            return plan
    fullest = max(range(size), key=lambda rank: ranks[rank].total)
    needed = ranks[fullest].total
    got = f"{memory_bytes:,} ({format_bytes(memory_bytes or 0)})"
    expected = f"at least {needed:,} ({format_bytes(needed)}), which rank {fullest} of {size} needs"
    remedy = "start more ranks, use a smaller batch or an optimizer with fewer slots, or tables with host=True"
    raise PlanError(describe("memory_bytes", got, expected, remedy))


def _choose_placement(table: Table, replicated_bytes: int, min_rows: int) -> str:
    """Replicate tables of at most ``replicated_bytes``; shard tables with fewer than ``min_rows`` rows by columns."""
    if table.evict:
        return "row"
    return "replicated" if table.bytes <= replicated_bytes else "column" if table.input_dim < min_rows else "row"


def _checked_placements(placements: Mapping[str, str], tables: Sequence[Table]) -> Mapping[str, str]:
    names = [table.name for table in tables]
    evicting = [table.name for table in tables if table.evict]
    for name, placement in placements.items():
        if name not in names:
            raise ValueError(describe("placements", f"table {name!r}", f"one of {names}", "check its name"))
        if placement not in PLACEMENTS:
            expected = "one of " + ", ".join(PLACEMENTS)
            raise ValueError(describe(f"placements[{name!r}]", placement, expected, "pass one of them"))
        if name in evicting and placement != "row":
            raise ValueError(describe(f"placements[{name!r}]", placement, "'row' for a table that evicts", "pass it"))
    return placements


def _count(layout: Layout, optimizer: str, batch: int) -> tuple[RankBytes, ...]:
    totals = []
    for rank in range(layout.size):
        parts = [(t.bytes, 0, SLOTS[_slot_kind(t.optimizer, optimizer)], t.host) for t in layout.replicated]
        gradients = sum(t.bytes for t in layout.replicated)
        exchange = 0
        for group in layout.groups:
            row = group.width * DTYPES[group.dtype]
            kind = _slot_kind(group.optimizer, optimizer)
            extra = _EVICTING_BYTES * group.rows[rank] * (group.evicts is not None)
            parts.append((group.rows[rank] * row, extra, SLOTS[kind], group.host))
            for table_slice in group.slices:
                lookups = batch * len(table_slice.table.features)
                rows = len(table_slice.rows(rank, layout.size))
                gradients += (2 * rows if kind in WHOLE_SHARDS else min(rows, lookups * layout.size)) * row
                if layout.size > 1:
                    exchange += lookups * ((4 if layout.keys < 2**31 else 8) + 2 * row)
        host = sum(weights * (1 + slots) + extra for weights, extra, slots, host in parts if host)
        slots = sum(slots * weights for weights, _, slots, host in parts if not host)
        weights = sum(weights + extra for weights, extra, _, host in parts if not host)
        totals.append(RankBytes(weights, slots, gradients, exchange, host))
    return tuple(totals)


def _slot_kind(optimizer: keras.optimizers.Optimizer | None, default: str) -> str:
    """Return the name under which an optimizer's slots are counted; ``default`` for a table without an optimizer."""
    if optimizer is None:
        return default
    name = type(optimizer).__name__.lower()
    if name == "sgd":
        return "momentum" if optimizer.momentum else "sgd"
    if name in ("adam", "adamw"):
        return "amsgrad" if optimizer.amsgrad else "adam"
    return name if name in SLOTS else "amsgrad"  # the maximum, for unknown optimizers
