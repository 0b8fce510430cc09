"""``hvdkit plan``: plan the placement of embedding tables and predict step times without starting a job."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hvdkit.commands.measure.cost import Scaling, doublings, predict_scaling
from hvdkit.commands.measure.measurements import Measurements
from hvdkit.commands.options import UNSET
from hvdkit.errors import describe
from hvdkit.sharding.plan import Plan, plan_tables
from hvdkit.sharding.table import Table

_TABLE = re.compile(r"(?P<name>[^:=]+):(?P<rows>\d[\d_,]*)x(?P<width>\d+)(=(?P<placement>\w+))?")
_RANKS = re.compile(r"(?P<first>\d+)(\.\.(?P<last>\d+))?")
_BITS = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)bit(/s)?", re.IGNORECASE)
_BYTES = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>|[KMGT]i?B?|B)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Plan the placement of embedding tables and each rank's memory; or predict the step time of a model.

    For example:
        hvdkit plan --tables items:10000000x64 users:2000000x32 --ranks 8 --optimizer adagrad
        hvdkit tune -np 2 --model cifar10 --save cifar10.json
        hvdkit plan --measured cifar10.json --ranks 8..4096 --bandwidth 25Gbit

    See `hvdkit docs embeddings#where-tables-go` and `hvdkit docs tuning`.
    """

    tables: tuple[str, ...] = ()
    """NAME:ROWSxWIDTH, e.g. items:10000000x64; NAME:ROWSxWIDTH=column sets the placement (row, div, column, table,
    replicated)."""
    measured: Annotated[Path | None, UNSET] = None
    """Predict the steps of a model on this cluster, measured with `hvdkit tune --save FILE`."""
    ranks: str = "4"
    """Number of ranks; for --measured also FIRST..LAST, doubling."""
    bandwidth: Annotated[str | None, UNSET] = None
    """For --measured: bandwidth of a rank's link, if it differs from the measured one, e.g. 25Gbit."""
    latency_us: Annotated[float | None, UNSET] = None
    """For --measured: latency of a small message in microseconds, if it differs from the measured one."""
    memory: Annotated[str | None, UNSET] = None
    """Memory limit of one rank, e.g. 16GiB; exceeding it is an error."""
    optimizer: str = "sgd"
    """sgd, momentum, adagrad, adam, amsgrad, rmsprop or ftrl: determines the slots."""
    batch_size: int = 1024
    """Examples per batch on each rank."""
    ids_per_example: int = 1
    """Rows that an example looks up in each table."""
    dtype: str = "float32"
    """Dtype of the tables."""


def plan(config: PlanConfig) -> Plan | Scaling:
    """Return the plan for the command line's tables, or the predicted steps of the measured model.

    Raises:
        PlanError: the tables do not fit.
        ValueError: a table, a number or the measured file cannot be parsed.
    """
    if bool(config.tables) == (config.measured is not None):
        got = "both" if config.tables else "neither"
        raise ValueError(describe("--tables, --measured", got, "one of them", "see hvdkit plan --help"))
    match = _RANKS.fullmatch(str(config.ranks))
    if (
        match is None
        or 0 in map(int, filter(None, match.group("first", "last")))
        or (match["last"] and not config.measured)
    ):
        expected = "a number of ranks" if config.measured is None else "a number of ranks, or FIRST..LAST"
        raise ValueError(describe("--ranks", config.ranks, expected, "write e.g. 8"))
    first = int(match["first"])
    if config.measured is not None:
        bandwidth = None if config.bandwidth is None else bits_of(config.bandwidth)
        latency = None if config.latency_us is None else config.latency_us * 1e-6
        if latency is not None and not 0 <= latency < math.inf:
            raise ValueError(describe("--latency-us", config.latency_us, "microseconds, 0 or more", "pass e.g. 20"))
        ranks = doublings(first, int(match["last"] or first))
        return predict_scaling(Measurements.load(config.measured), ranks, bandwidth=bandwidth, latency=latency)
    tables = []
    placements = {}
    for text in config.tables:
        match = _TABLE.fullmatch(text)
        if match is None:
            raise ValueError(describe("--tables", text, "NAME:ROWSxWIDTH", "write e.g. items:10000000x64"))
        rows = int(re.sub("[_,]", "", match["rows"]))
        tables.append(Table(match["name"], rows, int(match["width"]), dtype=config.dtype))
        if match["placement"]:
            placements[match["name"]] = match["placement"]
    return plan_tables(
        tables,
        first,
        memory_bytes=None if config.memory is None else bytes_of(config.memory),
        optimizer=config.optimizer,
        batch_size=config.batch_size,
        ids_per_example=config.ids_per_example,
        placements=placements,
    )


def bits_of(text: str) -> float:
    """Parse a bandwidth as written by users; return bits per second.

    Example:
        >>> bits_of("200Mbit"), bits_of("1.5 Gbit/s")
        (200000000.0, 1500000000.0)
    """
    match = _BITS.fullmatch(text.strip())
    if match is None or float(match["number"]) == 0:
        raise ValueError(describe("--bandwidth", text, "a bandwidth", "write e.g. 25Gbit"))
    return float(match["number"]) * {"": 1e0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match["unit"].upper()]


def bytes_of(text: str) -> int:
    """Parse a number of bytes as written by users; KiB and K are 1024, KB is 1000.

    Example:
        >>> bytes_of("1.5GiB"), bytes_of("2 GB")
        (1610612736, 2000000000)
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(describe("--memory", text, "a number of bytes", "write e.g. 16GiB"))
    unit = match["unit"].upper()
    power = "BKMGT".index(unit[0]) if unit else 0
    base = 1000 if unit.endswith("B") and "I" not in unit else 1024
    return int(float(match["number"]) * base**power)
