"""The flight recorder's file: the last collectives of all ranks of a failed job."""

from __future__ import annotations

import json
import operator
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdkit.errors import see
from hvdkit.watchdog.flight_recorder import CollectiveRecord

FOLDER = "HVDKIT_FLIGHT_DIR"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RankFlight:
    """The last collectives of one rank, in order."""

    rank: int
    host: str
    clock: float  # seconds to add to the times of its records to make them comparable across ranks
    records: list[CollectiveRecord] = field(default_factory=list)

    def collectives(self) -> list[CollectiveRecord]:
        """Return the records, with times that are comparable across ranks."""
        return [
            one._replace(start=one.start + self.clock, end=None if one.end is None else one.end + self.clock)
            for one in self.records
        ]


def write(line: str, ranks: Sequence[RankFlight], size: int) -> str:
    """Write the file if any rank has recorded a collective; return the line about it, or "".

    The file is written to the folder ``HVDKIT_FLIGHT_DIR``, by default to ``TMPDIR`` or ``/tmp``. Only this user can
    read it. For ``line`` and ``size``, see :class:`FlightFile`.
    """
    if not any(one.records for one in ranks):
        return ""
    folder = os.environ.get(FOLDER) or os.environ.get("TMPDIR") or "/tmp"
    path = f"{folder}/hvdkit-flight-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
    document = {
        "version": _VERSION,
        "line": line,
        "ended": time.monotonic(),
        "size": size,
        "fields": CollectiveRecord._fields,  # documents the records for other readers
        "ranks": [vars(one) for one in ranks],
    }
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(file, "w") as opened:
                opened.write(json.dumps(document, separators=(",", ":")))
        except OSError:
            os.unlink(path)  # noqa: PTH108  partly written, e.g. on a full disk
            raise
    except OSError as error:
        return f"flight recorder: {path} cannot be written ({error.strerror})"
    return f"flight recorder: {path} (who waited for whom: hvdkit flight {path}); {see('failures')}"


@dataclass(frozen=True, kw_only=True)
class FlightFile:
    """Contents of a flight recorder's file.

    Attributes:
        line: the line that ends the job's output and names the rank that failed.
        ended: when the job ended, by the clock of the records.
        size: number of ranks of the job.
        ranks: records of the ranks that have sent them, in rank order.
    """

    line: str
    ended: float
    size: int
    ranks: tuple[RankFlight, ...]


def read(text: str) -> FlightFile:
    """Return the contents of a file. Raises ValueError if it is of another version, or not of the flight recorder."""
    try:
        document = json.loads(text)
        version = document["version"]
        if version == _VERSION:
            ranks = [
                RankFlight(**{**one, "records": [CollectiveRecord.from_json(record) for record in one["records"]]})
                for one in sorted(document["ranks"], key=lambda one: one["rank"])
            ]
            for one in ranks:
                one.collectives()
            size = operator.index(document["size"])
            return FlightFile(line=document["line"], ended=document["ended"], size=size, ranks=tuple(ranks))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("not a file of the flight recorder") from error
    raise ValueError(f"version {version} of the flight recorder's file, expected {_VERSION}")
