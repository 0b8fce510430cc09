"""``hvdkit flight FILE``: shows which ranks waited for which when a job failed, as text and as a trace."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from hvdkit.commands.options import output_errors, read_text
from hvdkit.errors import describe, listed, printable
from hvdkit.watchdog.flight_file import FlightFile, read
from hvdkit.watchdog.flight_recorder import CollectiveRecord

_MAX_NAMED = 8
_MAX_DRAWN = 16
_COLUMNS = 60
_SHORTEST = 0.1  # seconds that the drawing shows at least: a wait may have just begun, and clocks of hosts differ


@dataclass(frozen=True, kw_only=True)
class FlightConfig:
    """Show which ranks waited for which when a job failed.

    The job prints the file's path after its last line.

    For example:
        hvdkit flight /tmp/hvdkit-flight-20261123-120000-4242.json
        hvdkit flight /tmp/hvdkit-flight-20261123-120000-4242.json --trace trace.json

    See `hvdkit docs failures#the-flight-recorder`.
    """

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """The flight recorder's file."""
    trace: Annotated[Path | None, arg(aliases=["-o"], help_behavior_hint="")] = None
    """Also write a trace for ui.perfetto.dev or chrome://tracing."""


def flight(config: FlightConfig) -> str:
    """Return the text; also write the trace, if requested."""
    text = read_text("FILE", config.file)
    try:
        file = read(text)
    except ValueError as error:
        remedy = "pass the path that the job's last lines name"
        raise ValueError(describe("FILE", f"{config.file} ({error})", "a flight recorder's file", remedy)) from None
    lines = [file.line, *explain(file), *timeline(file)]
    if config.trace is not None:
        with output_errors("--trace", config.trace):
            config.trace.write_text(json.dumps(trace(file)))
        lines.append(f"trace: {config.trace} (open it at ui.perfetto.dev)")
    return "\n".join(map(printable, lines))  # the file may be another user's


def explain(file: FlightFile) -> list[str]:
    """Return lines that describe which ranks wait in which collective, for whom and how long, and what those ranks do.

    Ranks match collectives by their keys. The job hangs in a collective that only some of its ranks have entered; the
    cause is in the missing ranks. A rank without records, e.g. on a lost host, may be one of them.
    """
    records_of = {flight.rank: flight.collectives() for flight in file.ranks}
    waiting: dict[str, dict[int, CollectiveRecord]] = defaultdict(dict)
    last_end: dict[str, dict[int, float]] = defaultdict(dict)
    for rank, records in records_of.items():
        for record in records:
            if record.end is None:
                waiting[record.key][rank] = record
            else:
                last_end[record.key][rank] = record.end
    lines = []
    for key, by_rank in sorted(waiting.items(), key=lambda item: min(record.start for record in item[1].values())):
        first = min(by_rank.values(), key=lambda record: record.start)
        # A graph's collective has the same key at every step: ranks that last left it earlier have not entered again.
        entered = by_rank.keys() | {rank for rank, end in last_end[key].items() if end >= first.start}
        needed = range(file.size) if first.participants is None else first.participants
        missing = [rank for rank in needed if rank not in entered]
        waiting_ranks = f"{_ranks(sorted(by_rank))} {'waits' if len(by_rank) == 1 else 'wait'}"
        note = ""
        if missing:
            waiting_ranks += f" for {_ranks(missing)}"
        else:
            note = "; all of its ranks have entered it" if needed else "; which ranks take part is unknown"
        at_step = "" if first.step is None else f" at step {first.step}"
        seconds = file.ended - first.start
        lines.append(f"{waiting_ranks} in {first.what}{at_step}, for {seconds:.1f} s ({first.line}){note}")
        known = [rank for rank in missing[:_MAX_NAMED] if rank in records_of]
        lines += [f"  {_last_collective(rank, records_of[rank], file.ended)}" for rank in known]
    if not lines:
        shown = list(records_of.items())[:_MAX_NAMED]
        lines = [_last_collective(rank, records, file.ended) for rank, records in shown]
    unknown = [rank for rank in range(file.size) if rank not in records_of]
    return [*lines, f"no records of {_ranks(unknown)}"] if unknown else lines


def _last_collective(rank: int, records: Sequence[CollectiveRecord], ended: float) -> str:
    """Describe the collective that a rank is in, or otherwise the last one that it was in."""
    if not records:
        return f"rank {rank} has not entered a collective"
    record = max(records, key=lambda record: math.inf if record.end is None else record.end)
    at_step = "" if record.step is None else f" at step {record.step}"
    if record.end is None:
        return f"rank {rank} is in {record.what}{at_step} for {ended - record.start:.1f} s ({record.line})"
    ago = f"{ended - record.end:.1f} s ago"
    return f"rank {rank} returned from {record.what}{at_step} {ago}, and has not entered another ({record.line})"


def _ranks(numbers: Sequence[int]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {listed(numbers, _MAX_NAMED)}"


def timeline(file: FlightFile) -> list[str]:
    """Return a line per rank that shows when it was in a collective; an empty list if no rank waits in one.

    The first quarter of each line shows the time before the first collective in which a rank still waits. With too many
    ranks to draw, those that do not wait take precedence, because the others wait for them.
    """
    records_of = {flight.rank: flight.collectives() for flight in file.ranks}
    waits = {rank: [r.start for r in records if r.end is None] for rank, records in records_of.items()}
    if not any(waits.values()):
        return []
    waited = file.ended - min(min(starts) for starts in waits.values() if starts)
    seconds = max(waited * 4 / 3, _SHORTEST)
    drawn = sorted(sorted(records_of, key=lambda rank: bool(waits[rank]))[:_MAX_DRAWN])

    def column(time: float) -> int:
        return max(0, min(_COLUMNS - 1, int(_COLUMNS * (1 - (file.ended - time) / seconds))))

    lines = ["", f"the last {seconds:.1f} s: █ waits in a collective, ▒ collectives that have ended, · none"]
    for rank in drawn:
        cells = ["·"] * _COLUMNS
        for record in sorted(records_of[rank], key=lambda record: record.end is None):
            end = file.ended if record.end is None else record.end
            if end >= file.ended - seconds:
                begin = column(record.start)
                cells[begin : column(end) + 1] = ["█" if record.end is None else "▒"] * (column(end) + 1 - begin)
        lines.append(f"rank {rank:<{len(str(drawn[-1]))}} {''.join(cells)}")
    more = len(records_of) - len(drawn)
    return [*lines, f"and {more} more ranks"] if more else lines


def trace(file: FlightFile) -> dict[str, object]:
    """Return a trace in which each rank is a process. Source: "Trace Event Format", Google; microseconds."""
    events: list[dict[str, object]] = []
    zero = min((record.start for flight in file.ranks for record in flight.collectives()), default=0.0)
    for flight in file.ranks:
        name = {"name": f"rank {flight.rank} on {flight.host}"}
        events.append({"ph": "M", "name": "process_name", "pid": flight.rank, "tid": 0, "args": name})
        for record in flight.collectives():
            end = file.ended if record.end is None else record.end
            arguments = {"key": record.key, "line": record.line, "bytes": record.nbytes, "step": record.step}
            events.append(
                {
                    "ph": "X",
                    "name": record.what if record.end is not None else f"waits in {record.what}",
                    "pid": flight.rank,
                    "tid": 0,
                    "ts": (record.start - zero) * 1e6,
                    "dur": max(0.0, end - record.start) * 1e6,
                    "cname": "terrible" if record.end is None else "thread_state_iowait",
                    "args": arguments,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"end": file.line}}
