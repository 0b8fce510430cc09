"""Where the time of a step went, on each rank: parts that add up to the step's time.

Each moment of a step belongs to one part, the first of these that is true of it on that rank:

    wait      the training thread is in a collective (or save, or agreement) that some rank has not come to yet
    exchange  ... that all ranks have come to
    input     the training thread waits for the next batch
    save      the training thread saves
    compute   an op of TensorFlow runs that is no part of the input
    exchange  a collective of the graph is under way that all ranks have come to
    wait      a collective of the graph waits for a rank that has not come to it yet
    other     none of these: Python, starting ops, metrics, log lines

So an exchange beside which the rank computes counts as compute, and is shown as hidden.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdkit.profiling.intervals import Intervals, both, clip, total, union, without
from hvdkit.profiling.record import Collective, Record

PARTS = ("compute", "exchange", "wait", "input", "save", "other")


@dataclass(frozen=True)
class Step:
    """The parts of one step on one rank, in nanoseconds.

    Attributes:
        step: its number.
        steps: how many steps it stands for, where the program counts several at once.
        start, end: by rank 0's clock.
        parts: from each of :data:`PARTS` to its time; they add up to ``end - start``.
        hidden: time of exchanges beside which the rank computed; a part of compute.
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
        rank, host: which.
        steps: in their order.
        moments: when each part was, over all steps.
        blames: for each other rank: when this one did nothing but wait for it.
        clock_error: nanoseconds by which its times may be wrong beside rank 0's.
    """

    rank: int
    host: str
    steps: list[Step]
    moments: dict[str, Intervals]
    blames: dict[int, Intervals] = field(default_factory=dict)
    clock_error: int = 0


@dataclass(frozen=True)
class Met:
    """A collective beside the same one on the other ranks.

    Attributes:
        own: this rank's.
        met_at: when the last rank came to it, by rank 0's clock; not after this rank's end of it.
        last: that rank.
    """

    own: Collective
    met_at: int
    last: int


def divide(records: Sequence[Record]) -> list[RankParts]:
    """Return the parts of every step on every rank. The records' times are by one clock."""
    met = meet(records)
    return [_of_rank(record, met[record.rank]) for record in records]


def meet(records: Sequence[Record]) -> dict[int, list[Met]]:
    """Find for every rank's collectives the same ones on other ranks, by their names and times.

    A collective ends on no rank before it has begun on all, so the same one overlaps on all ranks, whereas the next
    one of that name begins after this one's end. What overlaps most belongs together.
    """
    by_name: dict[str, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for one in sorted(record.collectives, key=lambda c: c.start):
            by_name[one.name][record.rank].append(one)
    result: dict[int, list[Met]] = {record.rank: [] for record in records}
    for ranks in by_name.values():
        anchor = next(iter(ranks))
        rows = {rank: _beside(ranks[anchor], own) for rank, own in ranks.items()}
        for index in range(len(ranks[anchor])):
            there = {rank: own for rank, row in rows.items() if (own := row[index]) is not None}
            last = max(there, key=lambda rank: there[rank].start)
            for rank, own in there.items():
                result[rank].append(Met(own, min(own.end, max(own.start, there[last].start)), last))
    return {rank: sorted(found, key=lambda m: m.own.start) for rank, found in result.items()}


def _beside(anchors: list[Collective], own: list[Collective]) -> list[Collective | None]:
    """Return for each of ``anchors`` the one of ``own`` that overlaps it most, or None."""
    starts = [one.start for one in own]
    found: list[Collective | None] = []
    for anchor in anchors:
        first = bisect_left(starts, anchor.start)
        near = own[max(0, first - 1) : bisect_left(starts, anchor.end) + 1]
        best = max(near, key=lambda c: min(c.end, anchor.end) - max(c.start, anchor.start), default=None)
        overlaps = best is not None and min(best.end, anchor.end) >= max(best.start, anchor.start)
        found.append(best if overlaps else None)
    return found


def _of_rank(record: Record, met: list[Met]) -> RankParts:
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
        steps.append(Step(mark.step, mark.step - before.step, before.at, mark.at, parts, hidden))
    moments = {name: union(spans) for name, spans in moments.items()}
    waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for one in met:
        if one.last != record.rank:
            waits[one.last].append((one.own.start, one.met_at))
    blames = {rank: both(moments["wait"], union(spans)) for rank, spans in waits.items()}
    return RankParts(record.rank, record.host, steps, moments, blames, record.clock_error)


def _layers(record: Record, met: list[Met]) -> list[tuple[str, Intervals]]:
    """Return the parts in the order in which they take their moments."""
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
