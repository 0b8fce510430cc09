"""Break down the time of a step on each rank into parts that add up to the step's time.

Every point in time belongs to exactly one part, the first of these that applies on that rank:

    wait      the training thread is in a collective (or save, or agreement) that some rank has not entered yet
    exchange  ... that all ranks have entered
    input     the training thread waits for the next batch
    save      the training thread saves
    compute   a TensorFlow op runs that is not part of the input pipeline
    exchange  a collective in the graph is running that all ranks have entered
    wait      a collective in the graph waits for a rank that has not entered it yet
    other     everything else: Python, launching ops, metrics, logging

So an exchange that overlaps with computation counts as compute, and is reported as hidden.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdkit.profiling.intervals import Intervals, both, clip, total, union, without
from hvdkit.profiling.record import RankProfile, TimedCollective

PARTS = ("compute", "exchange", "wait", "input", "save", "other")


@dataclass(frozen=True)
class StepParts:
    """The parts of one step on one rank, in nanoseconds.

    Attributes:
        step: number of the step.
        steps: number of steps it represents, if the program counts several at once.
        start, end: in rank 0's clock.
        parts: the time of each of :data:`PARTS`; they add up to ``end - start``.
        hidden: time of exchanges that overlapped with computation; included in compute.
    """

    step: int
    steps: int
    start: int
    end: int
    parts: dict[str, int]
    hidden: int


@dataclass
class RankParts:
    """One rank's steps.

    Attributes:
        rank, host: the rank and its host.
        steps: the steps, in order.
        moments: the intervals of each part, over all steps.
        blames: for each other rank, the intervals in which this rank only waited for it.
        clock_error: maximum error of its times relative to rank 0's clock, nanoseconds.
    """

    rank: int
    host: str
    steps: list[StepParts]
    moments: dict[str, Intervals]
    blames: dict[int, Intervals] = field(default_factory=dict)
    clock_error: int = 0


@dataclass(frozen=True)
class MatchedCollective:
    """A collective, matched with the same one on other ranks.

    Attributes:
        own: the collective on this rank.
        met_at: the time at which the last rank entered it, in rank 0's clock; not after it ended on this rank.
        last: the last rank to enter it.
    """

    own: TimedCollective
    met_at: int
    last: int


def divide(records: Sequence[RankProfile]) -> list[RankParts]:
    """Return the parts of every step on every rank. The records' times must be in one clock."""
    met = meet(records)
    return [_of_rank(record, met[record.rank]) for record in records]


def meet(records: Sequence[RankProfile]) -> dict[int, list[MatchedCollective]]:
    """Match every rank's collectives with those of other ranks, by name and time.

    A collective cannot end on any rank before it has started on all, so it overlaps on all ranks, and the next one with
    the same name starts after its end. The collectives with the largest overlap are matched.
    """
    by_name: dict[str, dict[int, list[TimedCollective]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for one in sorted(record.collectives, key=lambda c: c.start):
            by_name[one.name][record.rank].append(one)
    result: dict[int, list[MatchedCollective]] = {record.rank: [] for record in records}
    for ranks in by_name.values():
        anchor = next(iter(ranks))
        rows = {rank: _beside(ranks[anchor], own) for rank, own in ranks.items()}
        for index in range(len(ranks[anchor])):
            there = {rank: own for rank, row in rows.items() if (own := row[index]) is not None}
            last = max(there, key=lambda rank: there[rank].start)
            for rank, own in there.items():
                result[rank].append(MatchedCollective(own, min(own.end, max(own.start, there[last].start)), last))
    return {rank: sorted(found, key=lambda m: m.own.start) for rank, found in result.items()}


def _beside(anchors: list[TimedCollective], own: list[TimedCollective]) -> list[TimedCollective | None]:
    """Return, for each of ``anchors``, the collective in ``own`` with the largest overlap, or None."""
    starts = [one.start for one in own]
    found: list[TimedCollective | None] = []
    for anchor in anchors:
        first = bisect_left(starts, anchor.start)
        near = own[max(0, first - 1) : bisect_left(starts, anchor.end) + 1]
        best = max(near, key=lambda c: min(c.end, anchor.end) - max(c.start, anchor.start), default=None)
        overlaps = best is not None and min(best.end, anchor.end) >= max(best.start, anchor.start)
        found.append(best if overlaps else None)
    return found


def _of_rank(record: RankProfile, met: list[MatchedCollective]) -> RankParts:
    layers = _layers(record, met)
    moments: dict[str, Intervals] = {name: [] for name in PARTS}
    steps = []
    exchanges = union((m.met_at, m.own.end) for m in met if not m.own.blocking)
    for before, mark in zip(record.marks, record.marks[1:], strict=False):
        left: Intervals = [(before.at, mark.at)] if before.at < mark.at else []
        parts = dict.fromkeys(PARTS, 0)
        hidden = 0
        for name, spans in layers:
            taken = both(left, clip(spans, before.at, mark.at))
            if name == "compute":
                hidden = total(both(taken, clip(exchanges, before.at, mark.at)))
            parts[name] += total(taken)
            moments[name] += taken
            left = without(left, taken)
        parts["other"] = total(left)
        moments["other"] += left
        steps.append(StepParts(mark.step, mark.step - before.step, before.at, mark.at, parts, hidden))
    moments = {name: union(spans) for name, spans in moments.items()}
    waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for one in met:
        if one.last != record.rank:
            waits[one.last].append((one.own.start, one.met_at))
    blames = {rank: both(moments["wait"], union(spans)) for rank, spans in waits.items()}
    return RankParts(record.rank, record.host, steps, moments, blames, record.clock_error)


def _layers(record: RankProfile, met: list[MatchedCollective]) -> list[tuple[str, Intervals]]:
    """Return the parts with their intervals, in order of precedence."""
    blocking = [m for m in met if m.own.blocking]
    graph = [m for m in met if not m.own.blocking]
    kinds: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for span in record.spans:
        kinds[span.kind].append((span.start, span.end))
    return [
        ("wait", union((m.own.start, m.met_at) for m in blocking)),
        ("exchange", union((m.met_at, m.own.end) for m in blocking)),
        ("input", union(kinds["input"])),
        ("save", union(kinds["save"])),
        ("compute", union(kinds["op"])),
        ("exchange", union((m.met_at, m.own.end) for m in graph)),
        ("wait", union((m.own.start, m.met_at) for m in graph)),
    ]
