"""Write all ranks' records as one trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

Source: "Trace Event Format", Google. Times are microseconds; a rank is a process, a track is a thread.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdkit.profiling.record import RankProfile
from hvdkit.profiling.step_parts import PARTS, MatchedCollective, RankParts, meet

STEPS, WHERE, TRAINING, EXCHANGES, THREADS, TENSORS = 1, 2, 3, 10, 100, 1000
# Ops shorter than SHORTEST_NS are only counted; of the others, the MOST_OPS longest are drawn.
SHORTEST_NS, MOST_OPS = 5_000, 60_000
_COLOURS = {
    "compute": "thread_state_running",
    "exchange": "thread_state_iowait",
    "wait": "terrible",
    "input": "thread_state_runnable",
    "save": "yellow",
    "other": "grey",
}


def write(path: Path, records: Sequence[RankProfile], ranks: Sequence[RankParts]) -> None:
    """Write the compressed trace of all ranks; times start at 0."""
    document = document_of(records, ranks)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(document, file, separators=(",", ":"))


def document_of(records: Sequence[RankProfile], ranks: Sequence[RankParts]) -> dict[str, Any]:
    """Return the trace as a Trace Event Format object."""
    zero = min((moment for record in records for moment in _beginnings(record)), default=0)
    met = meet(records)
    events: list[dict[str, Any]] = []
    for record, parts in zip(records, ranks, strict=True):
        drawn = _RankEvents(record.rank, zero)
        drawn.process(f"rank {record.rank} on {record.host}")
        _draw_parts(drawn, parts)
        _draw_record(drawn, record, met[record.rank])
        events += drawn.events
    events.sort(key=lambda e: (e["ph"] != "M", e.get("ts", 0.0), -e.get("dur", 0.0)))
    errors = {f"rank {r.rank}": r.clock_error / 1000 for r in records}
    about = {"left_out_ops": {f"rank {r.rank}": r.left_out for r in records}, "clock_error_us": errors}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _beginnings(record: RankProfile) -> Iterator[int]:
    yield from (mark.at for mark in record.marks)
    for listed in (record.spans, record.collectives, record.phases):
        yield from (one.start for one in listed)


def shortened(record: RankProfile, most: int = MOST_OPS) -> None:
    """Drop ops that are too short to be visible, and the shortest beyond ``most``; record their number."""
    ops = [span for span in record.spans if span.kind in ("op", "data")]
    kept = [span for span in ops if span.end - span.start >= SHORTEST_NS]
    kept = sorted(kept, key=lambda span: span.start - span.end)[:most]
    record.left_out = len(ops) - len(kept)
    record.spans = [span for span in record.spans if span.kind not in ("op", "data")] + kept


class _RankEvents:
    """The events of one rank."""

    def __init__(self, rank: int, zero: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._rank, self._zero = rank, zero
        self._tracks: set[int] = set()

    def process(self, name: str) -> None:
        """Name the process."""
        self._metadata("process_name", name=name)
        self._metadata("process_sort_index", sort_index=self._rank)

    def slice(self, track: int, shown: str, name: str, span: tuple[int, int], **more: Any) -> None:
        """Draw a slice on a track; a new track is named ``shown``."""
        if track not in self._tracks:
            self._tracks.add(track)
            self._metadata("thread_name", tid=track, name=shown)
            self._metadata("thread_sort_index", tid=track, sort_index=track)
        start, end = ((moment - self._zero) / 1000 for moment in span)
        event = {"ph": "X", "name": name, "pid": self._rank, "tid": track, "ts": start, "dur": max(0.0, end - start)}
        self.events.append({**event, **more})

    def _metadata(self, what: str, tid: int = 0, **arguments: Any) -> None:
        self.events.append({"ph": "M", "name": what, "pid": self._rank, "tid": tid, "args": arguments})


def _draw_parts(drawn: _RankEvents, parts: RankParts) -> None:
    for step in parts.steps:
        times = {name: step.parts[name] / 1e6 for name in PARTS} | {"hidden": step.hidden / 1e6}
        shown = {f"{name} ms": round(value, 3) for name, value in times.items()}
        drawn.slice(STEPS, "steps", f"step {step.step}", (step.start, step.end), args=shown)
    for name in PARTS:
        for span in parts.moments[name]:
            if span[1] - span[0] < SHORTEST_NS:
                continue
            drawn.slice(WHERE, "where the time goes", name, span, cname=_COLOURS[name])


def _draw_record(drawn: _RankEvents, record: RankProfile, met: list[MatchedCollective]) -> None:
    spans = [s for s in record.spans if s.kind in ("input", "save")]
    for lane, span in _lanes((s.start, s.end, s) for s in spans):
        drawn.slice(TRAINING + lane, "input and saves", span.name, (span.start, span.end), cat=span.kind)
    for lane, one in _lanes((m.own.start, m.own.end, m) for m in met):
        shown = "exchanges" if lane == 0 else f"exchanges, {lane + 1}"
        own = one.own
        waited = {"waits for rank": one.last} if one.last != record.rank and one.met_at > own.start else {}
        if one.met_at > own.start:
            drawn.slice(EXCHANGES + lane, shown, f"wait: {own.name}", (own.start, one.met_at), cat="wait", args=waited)
        drawn.slice(EXCHANGES + lane, shown, own.name, (one.met_at, own.end), cat="exchange")
    threads = {name: number for number, name in enumerate(sorted({s.track for s in record.spans if s.kind == "op"}))}
    for span in record.spans:
        if span.kind == "op":
            thread = threads[span.track]
            name, _, kind = span.name.replace(": ", ":").rpartition(":")
            shown = f"TensorFlow {span.track.partition('/')[0]} {thread + 1}"
            # Perfetto colors slices by name, so use the kind of op, not its path in the model.
            drawn.slice(THREADS + thread, shown, kind, (span.start, span.end), args={"op": name or kind})
    tensors = {name: number for number, name in enumerate(dict.fromkeys(p.tensor for p in record.phases))}
    for phase in record.phases:
        drawn.slice(TENSORS + tensors[phase.tensor], f"Horovod {phase.tensor}", phase.name, (phase.start, phase.end))


def _lanes(spans: Iterable[tuple[int, int, Any]]) -> Iterator[tuple[int, Any]]:
    """Assign ``spans`` to lanes such that spans in a lane do not overlap; yield (lane, object)."""
    ends: list[int] = []
    for start, end, one in sorted(spans, key=lambda span: span[:2]):
        lane = next((i for i, busy in enumerate(ends) if busy <= start), len(ends))
        ends[lane : lane + 1] = [end]
        yield lane, one
