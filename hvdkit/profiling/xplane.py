"""Read the output of TensorFlow's profiler: ops, collectives inside graphs, and the input pipeline.

For asynchronous ops, such as all of Horovod's, TensorFlow's executor records the start
(``ExecutorState::ProcessAsync::Start``) and the arrival of the result (``...::Done``) on every rank, whereas only rank
0 writes Horovod's own timeline.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdkit.profiling.intervals import union
from hvdkit.profiling.rank_profile import Span, TimedCollective

if TYPE_CHECKING:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

# The recorder traces an event with this name at a known time of the monotonic clock.
CLOCK = "hvdkit.clock"
_OP = re.compile(r"(?P<name>[\w./\-<>+]+):(?P<kind>_?[A-Z]\w*)")
_EAGER = re.compile(r"EagerLocalExecute: (?P<kind>[A-Z]\w*)")
_START = "ExecutorState::ProcessAsync::Start"
_DONE = "ExecutorState::ProcessAsync::Done"
# Events that enclose the ops of tf.data.
_PIPELINE = ("Iterator::", "InstantiatedCapturedFunction::")
_NEXT = ("IteratorGetNext", "OptionalIteratorGetNext", "MultiDeviceIteratorGetNext")


class Traced(NamedTuple):
    """The contents of a TensorFlow profiler file; times in the monotonic clock, in nanoseconds."""

    spans: list[Span]
    collectives: list[TimedCollective]


class _Event(NamedTuple):
    name: str
    start: int
    end: int
    details: dict[str, int | float | str | bytes]


def read(path: Path, clock: int) -> Traced:
    """Read the ``*.xplane.pb`` file ``path``; ``clock`` is the monotonic clock at the event named :data:`CLOCK`.

    Raises:
        ImportError: this TensorFlow lacks a reader for the format.
        ValueError: the file lacks an event with that name.
    """
    lines = list(_lines(path))
    clock_events = [event.start for _, _, events in lines for event in events if event.name == CLOCK]
    if not clock_events:
        raise ValueError(f"{path.name}: no event {CLOCK}, without which its times are unknown")
    shift = clock - min(clock_events)
    recording_end = max(event.end for _, _, events in lines for event in events) + shift
    spans: list[Span] = []
    collectives: list[TimedCollective] = []
    starts: dict[tuple[object, object], list[int]] = defaultdict(list)
    ends: dict[tuple[object, object], list[int]] = defaultdict(list)
    for on_device, track, events in lines:
        shifted = [event._replace(start=event.start + shift, end=event.end + shift) for event in events]
        if on_device:  # a GPU's kernels and copies, except NCCL's, which are communication
            kernels = [event for event in shifted if "nccl" not in event.name.lower()]
            spans += [Span("op", event.name, track, event.start, event.end) for event in kernels]
        else:
            spans += _host_spans(track, shifted)
        for event in shifted:
            if event.name in (_START, _DONE) and str(event.details.get("kernel_type", "")).startswith("Horovod"):
                times = starts if event.name == _START else ends
                times[event.details.get("step_id"), event.details.get("name")].append(event.start)
            elif (match := _EAGER.fullmatch(event.name)) and match["kind"].startswith("Horovod"):
                collectives.append(TimedCollective(f"eager {match['kind']}", event.start, event.end, True))
    for (step_id, name), start_times in starts.items():
        # A run of a graph executes each collective once, or several times in sequence if it is in a loop. The last end
        # is missing if the recording stopped before it.
        end_times = sorted(ends[step_id, name])[: len(start_times)]
        for start, end in zip_longest(sorted(start_times), end_times, fillvalue=recording_end):
            # Strip scopes: they are numbered by the layers created in the process, which may differ between ranks.
            collectives.append(TimedCollective(str(name).rpartition("/")[2], start, max(start, end), False))
    return Traced(spans, collectives)


def _host_spans(track: str, events: list[_Event]) -> Iterator[Span]:
    """Yield the op and input spans of one thread."""
    pipeline = union((e.start, e.end) for e in events if e.name.startswith(_PIPELINE))
    starts = [start for start, _ in pipeline]
    for event in events:
        match = _OP.fullmatch(event.name) or _EAGER.fullmatch(event.name)
        kind = match["kind"] if match else event.name
        if kind.startswith(_NEXT):
            yield Span("input", kind, track, event.start, event.end)
        elif match and not kind.startswith("Horovod"):
            index = bisect_right(starts, event.start) - 1
            inside = index >= 0 and event.end <= pipeline[index][1]
            yield Span("data" if inside else "op", event.name, track, event.start, event.end)


def _lines(path: Path) -> Iterator[tuple[bool, str, list[_Event]]]:
    """Yield (is GPU stream, name, events) for each thread and GPU stream."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    for plane in space.planes:
        on_device = plane.name.startswith("/device:GPU")
        if not on_device and plane.name != "/host:CPU":
            continue
        names = {key: value.name for key, value in plane.event_metadata.items()}
        keys = {key: value.name for key, value in plane.stat_metadata.items()}
        for line in plane.lines:
            if on_device and not line.name.startswith("Stream"):
                continue  # other lines show the same time by step, module or scope
            track = f"{plane.name.removeprefix('/device:')} {line.name}" if on_device else line.name
            yield on_device, f"{track}#{line.id & 0xFFFFFFFF:x}", [_event(e, line, names, keys) for e in line.events]


def _event(event: xplane_pb2.XEvent, line: xplane_pb2.XLine, names: dict[int, str], keys: dict[int, str]) -> _Event:
    start = line.timestamp_ns + event.offset_ps // 1000
    name = names[event.metadata_id]
    details = {keys[s.metadata_id]: _value(s, keys) for s in event.stats} if name in (_START, _DONE) else {}
    return _Event(name, start, start + event.duration_ps // 1000, details)


def _value(stat: xplane_pb2.XStat, keys: dict[int, str]) -> int | float | str | bytes:
    kind = stat.WhichOneof("value")
    value = getattr(stat, kind)
    return keys[value] if kind == "ref_value" else value
