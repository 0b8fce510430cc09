"""Write all ranks' profiles as one trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

Source: "Trace Event Format", Google. Times are microseconds; a rank is a process, a track is a thread.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from hvdkit.profiling.rank_profile import RankProfile
from hvdkit.profiling.step_parts import PARTS, RankParts

TraceEvent: TypeAlias = dict[str, Any]
"""A JSON object of the format."""
Drawn = TypeVar("Drawn")
# Numbers of the tracks. From TRAINING on, each is the first of several.
STEPS = 1
STEP_PARTS = 2
TRAINING = 3
EXCHANGES = 10
THREADS = 100
TENSORS = 1000
# Shorter parts and ops are not drawn; of the ops, the MOST_OPS longest are drawn.
SHORTEST_NS = 5_000
MOST_OPS = 60_000
_COLORS = {
    "compute": "thread_state_running",
    "exchange": "thread_state_iowait",
    "wait": "terrible",
    "input": "thread_state_runnable",
    "save": "yellow",
    "other": "grey",
}


def write(path: Path, profiles: Sequence[RankProfile], ranks: Sequence[RankParts]) -> None:
    """Write the compressed trace of all ranks; times start at 0."""
    document = as_json(profiles, ranks)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(document, file, separators=(",", ":"))


def as_json(profiles: Sequence[RankProfile], ranks: Sequence[RankParts]) -> dict[str, object]:
    """Return the trace as a Trace Event Format object."""
    zero = min((start for profile in profiles for start in _starts(profile)), default=0)
    events: list[TraceEvent] = []
    for profile, parts in zip(profiles, ranks, strict=True):
        drawn = _RankEvents(profile, zero)
        _draw_parts(drawn, parts)
        _draw_collectives(drawn, parts)
        _draw_activities(drawn, profile)
        events += drawn.events
    events.sort(key=lambda e: (e["ph"] != "M", e.get("ts", 0.0), -e.get("dur", 0.0)))
    other = {
        "left_out_ops": {f"rank {profile.rank}": profile.left_out for profile in profiles},
        "clock_error_us": {f"rank {profile.rank}": profile.clock_error / 1000 for profile in profiles},
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _starts(profile: RankProfile) -> Iterator[int]:
    yield from (mark.at for mark in profile.marks)
    for activities in (profile.spans, profile.collectives, profile.phases):
        yield from (activity.start for activity in activities)


class _RankEvents:
    """The events of one rank."""

    def __init__(self, profile: RankProfile, zero: int) -> None:
        self.events: list[TraceEvent] = []
        self._rank = profile.rank
        self._zero = zero
        self._tracks: set[int] = set()
        self._metadata("process_name", name=f"rank {profile.rank} on {profile.host}")
        self._metadata("process_sort_index", sort_index=profile.rank)

    def slice(self, track: int, shown: str, name: str, span: tuple[int, int], **more: object) -> None:
        """Draw a slice on a track; a new track is named ``shown``."""
        if track not in self._tracks:
            self._tracks.add(track)
            self._metadata("thread_name", tid=track, name=shown)
            self._metadata("thread_sort_index", tid=track, sort_index=track)
        start, end = ((time - self._zero) / 1000 for time in span)
        event = {"ph": "X", "name": name, "pid": self._rank, "tid": track, "ts": start, "dur": max(0.0, end - start)}
        self.events.append({**event, **more})

    def _metadata(self, what: str, tid: int = 0, **arguments: object) -> None:
        self.events.append({"ph": "M", "name": what, "pid": self._rank, "tid": tid, "args": arguments})


def _draw_parts(drawn: _RankEvents, parts: RankParts) -> None:
    for step in parts.steps:
        times = {name: step.parts[name] / 1e6 for name in PARTS} | {"hidden": step.hidden / 1e6}
        shown = {f"{name} ms": round(value, 3) for name, value in times.items()}
        drawn.slice(STEPS, "steps", f"step {step.step}", (step.start, step.end), args=shown)
    for name in PARTS:
        for span in parts.intervals[name]:
            if span[1] - span[0] < SHORTEST_NS:
                continue
            drawn.slice(STEP_PARTS, "where the time goes", name, span, cname=_COLORS[name])


def _draw_collectives(drawn: _RankEvents, parts: RankParts) -> None:
    for lane, collective in _lanes((c.local.start, c.local.end, c) for c in parts.collectives):
        track = EXCHANGES + lane
        shown = "exchanges" if lane == 0 else f"exchanges, {lane + 1}"
        local = collective.local
        entry = collective.last_entry
        last_rank = collective.last_rank
        if entry > local.start:
            waits_for = {"waits for rank": last_rank} if last_rank != parts.rank else {}
            drawn.slice(track, shown, f"wait: {local.name}", (local.start, entry), cat="wait", args=waits_for)
        drawn.slice(track, shown, local.name, (entry, local.end), cat="exchange")


def _draw_activities(drawn: _RankEvents, profile: RankProfile) -> None:
    spans = [s for s in profile.spans if s.kind in ("input", "save")]
    for lane, span in _lanes((s.start, s.end, s) for s in spans):
        drawn.slice(TRAINING + lane, "input and saves", span.name, (span.start, span.end), cat=span.kind)
    threads = {name: number for number, name in enumerate(sorted({s.track for s in profile.spans if s.kind == "op"}))}
    for span in profile.spans:
        if span.kind == "op":
            thread = threads[span.track]
            name, _, kind = span.name.replace(": ", ":").rpartition(":")
            shown = f"TensorFlow {span.track.partition('/')[0]} {thread + 1}"
            # Perfetto colors slices by name, so use the kind of op, not its path in the model.
            drawn.slice(THREADS + thread, shown, kind, (span.start, span.end), args={"op": name or kind})
    tensors = {name: number for number, name in enumerate(dict.fromkeys(p.tensor for p in profile.phases))}
    for phase in profile.phases:
        drawn.slice(TENSORS + tensors[phase.tensor], f"Horovod {phase.tensor}", phase.name, (phase.start, phase.end))


def _lanes(spans: Iterable[tuple[int, int, Drawn]]) -> Iterator[tuple[int, Drawn]]:
    """Assign ``spans`` to lanes such that spans in a lane do not overlap; yield (lane, object)."""
    ends: list[int] = []
    for start, end, drawn in sorted(spans, key=lambda span: span[:2]):
        lane = next((i for i, busy in enumerate(ends) if busy <= start), len(ends))
        ends[lane : lane + 1] = [end]
        yield lane, drawn
