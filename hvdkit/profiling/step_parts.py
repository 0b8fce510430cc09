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

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.profiling.intervals import Intervals, clip, difference, intersection, total, union
from hvdkit.profiling.rank_profile import RankProfile, TimedCollective

PARTS = ("compute", "exchange", "wait", "input", "save", "other")


@dataclass(frozen=True)
class StepParts:
    """The parts of one step on one rank, in nanoseconds of rank 0's clock."""

    step: int  # its number
    steps: int  # number of steps it represents, if the program counts several at once
    start: int
    end: int
    parts: dict[str, int]  # the time of each of PARTS; they add up to end - start
    hidden: int  # time of exchanges that overlapped with computation; included in compute


@dataclass
class RankParts:
    """One rank's steps."""

    rank: int
    host: str
    steps: list[StepParts]  # in order
    intervals: dict[str, Intervals]  # of each part, over all steps
    waits_for: dict[int, Intervals]  # for each other rank, when this rank only waited for it
    collectives: list[MatchedCollective]  # in order
    clock_error: int  # maximum error of its times relative to rank 0's clock, nanoseconds


@dataclass(frozen=True)
class MatchedCollective:
    """A collective, matched with the same one on other ranks."""

    local: TimedCollective  # on this rank
    last_entry: int  # when the last rank entered it, in rank 0's clock; not after it ended on this rank
    last_rank: int  # the last rank to enter it


def divide(profiles: Sequence[RankProfile]) -> list[RankParts]:
    """Return the parts of every step on every rank. The profiles' times must be in one clock."""
    matched = match_collectives(profiles)
    return [_divide_rank(profile, matched[profile.rank]) for profile in profiles]


def match_collectives(profiles: Sequence[RankProfile]) -> dict[int, list[MatchedCollective]]:
    """Match every rank's collectives with those of other ranks, by name and time.

    A collective cannot end on any rank before it has started on all, so it overlaps on all ranks, and the next one with
    the same name starts after its end. The collectives with the largest overlap are matched.
    """
    by_name: dict[str, dict[int, list[TimedCollective]]] = defaultdict(lambda: defaultdict(list))
    for profile in profiles:
        for collective in sorted(profile.collectives, key=lambda c: c.start):
            by_name[collective.name][profile.rank].append(collective)
    matched: dict[int, list[MatchedCollective]] = {profile.rank: [] for profile in profiles}
    for by_rank in by_name.values():
        anchors = next(iter(by_rank.values()))
        columns = {rank: _largest_overlaps(anchors, collectives) for rank, collectives in by_rank.items()}
        for index in range(len(anchors)):
            entered = {rank: local for rank, column in columns.items() if (local := column[index]) is not None}
            last_rank = max(entered, key=lambda rank: entered[rank].start)
            for rank, local in entered.items():
                last_entry = min(local.end, max(local.start, entered[last_rank].start))
                matched[rank].append(MatchedCollective(local, last_entry, last_rank))
    return {rank: sorted(collectives, key=lambda c: c.local.start) for rank, collectives in matched.items()}


def _largest_overlaps(
    anchors: list[TimedCollective], collectives: list[TimedCollective]
) -> list[TimedCollective | None]:
    """Return, for each of ``anchors``, the collective with the largest overlap, or None."""
    starts = [collective.start for collective in collectives]
    overlapping: list[TimedCollective | None] = []
    for anchor in anchors:
        first = bisect_left(starts, anchor.start)
        near = collectives[max(0, first - 1) : bisect_left(starts, anchor.end) + 1]
        best = max(near, key=lambda c: min(c.end, anchor.end) - max(c.start, anchor.start), default=None)
        overlaps = best is not None and min(best.end, anchor.end) >= max(best.start, anchor.start)
        overlapping.append(best if overlaps else None)
    return overlapping


def _divide_rank(profile: RankProfile, collectives: list[MatchedCollective]) -> RankParts:
    layers = _layers(profile, collectives)
    intervals: dict[str, Intervals] = {name: [] for name in PARTS}
    steps = []
    exchanges = union((c.last_entry, c.local.end) for c in collectives if not c.local.blocking)
    for start, end in itertools.pairwise(profile.marks):
        left: Intervals = [(start.at, end.at)] if start.at < end.at else []
        parts = dict.fromkeys(PARTS, 0)
        hidden = 0
        for name, spans in layers:
            taken = intersection(left, clip(spans, start.at, end.at))
            if name == "compute":
                hidden = total(intersection(taken, clip(exchanges, start.at, end.at)))
            parts[name] += total(taken)
            intervals[name] += taken
            left = difference(left, taken)
        parts["other"] = total(left)
        intervals["other"] += left
        steps.append(StepParts(end.step, end.step - start.step, start.at, end.at, parts, hidden))
    intervals = {name: union(spans) for name, spans in intervals.items()}
    waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for collective in collectives:
        if collective.last_rank != profile.rank:
            waits[collective.last_rank].append((collective.local.start, collective.last_entry))
    waits_for = {rank: intersection(intervals["wait"], union(spans)) for rank, spans in waits.items()}
    return RankParts(profile.rank, profile.host, steps, intervals, waits_for, collectives, profile.clock_error)


def _layers(profile: RankProfile, collectives: list[MatchedCollective]) -> list[tuple[str, Intervals]]:
    """Return the parts with their intervals, in order of precedence."""
    blocking = [c for c in collectives if c.local.blocking]
    graph = [c for c in collectives if not c.local.blocking]
    kinds: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for span in profile.spans:
        kinds[span.kind].append((span.start, span.end))
    return [
        ("wait", union((c.local.start, c.last_entry) for c in blocking)),
        ("exchange", union((c.last_entry, c.local.end) for c in blocking)),
        ("input", union(kinds["input"])),
        ("save", union(kinds["save"])),
        ("compute", union(kinds["op"])),
        ("exchange", union((c.last_entry, c.local.end) for c in graph)),
        ("wait", union((c.local.start, c.last_entry) for c in graph)),
    ]
