"""``hvdkit plan``: where embedding tables go, and what that costs, before anything is started."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvdkit.errors import describe
from hvdkit.planning.plan import Plan, plan_tables
from hvdkit.planning.table import Table

_TABLE = re.compile(r"(?P<name>[^:=]+):(?P<rows>\d[\d_,]*)x(?P<width>\d+)(=(?P<placement>\w+))?")
_BYTES = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>|[KMGT]i?B?|B)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class PlanTables:
    """Say where embedding tables go and how many bytes every rank needs."""

    tables: tuple[str, ...]
    """NAME:ROWSxWIDTH, e.g. items:10000000x64; NAME:ROWSxWIDTH=column places one by hand (row, div, column, table,
    replicated)."""
    ranks: int = 4
    """Number of ranks."""
    memory: str | None = None
    """What one rank may need in all, e.g. 16GiB; more is an error."""
    optimizer: str = "sgd"
    """sgd, momentum, adagrad, adam, amsgrad, rmsprop or ftrl: decides the slots."""
    batch_size: int = 1024
    """Examples of one rank's batch."""
    ids_per_example: int = 1
    """Rows that an example looks up in each table."""
    dtype: str = "float32"
    """Of the tables."""


def plan(config: PlanTables) -> Plan:
    """Return the plan for the command line's tables.

    Raises:
        PlanError: it does not fit.
        ValueError: a table or the memory cannot be understood.
    """
    tables, placements = [], {}
    for text in config.tables:
        found = _TABLE.fullmatch(text)
        if found is None:
            raise ValueError(describe("--tables", text, "NAME:ROWSxWIDTH", "write e.g. items:10000000x64"))
        rows = int(re.sub("[_,]", "", found["rows"]))
        tables.append(Table(found["name"], rows, int(found["width"]), dtype=config.dtype))
        if found["placement"]:
            placements[found["name"]] = found["placement"]
    return plan_tables(
        tables,
        config.ranks,
        memory_bytes=None if config.memory is None else bytes_of(config.memory),
        optimizer=config.optimizer,
        batch_size=config.batch_size,
        ids_per_example=config.ids_per_example,
        placements=placements,
    )


def bytes_of(text: str) -> int:
    """Return a number of bytes as people write it; KiB and K are 1024, KB is 1000.

    Example:
        >>> bytes_of("1.5GiB"), bytes_of("2 GB")
        (1610612736, 2000000000)
    """
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(describe("--memory", text, "a number of bytes", "write e.g. 16GiB"))
    unit = found["unit"].upper()
    power = "BKMGT".index(unit[0]) if unit else 0
    base = 1000 if unit.endswith("B") and "I" not in unit else 1024
    return int(float(found["number"]) * base**power)
