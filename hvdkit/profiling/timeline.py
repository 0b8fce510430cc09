"""Read Horovod's own timeline: the phases of each tensor (Horovod 0.28.1, ``common/timeline.cc``).

Only rank 0 writes it. The file is JSON, truncated if the process was killed.
"""

from __future__ import annotations

import json
from pathlib import Path

from hvdkit.profiling.rank_profile import Phase
from hvdkit.profiling.trace import TraceEvent


def read(path: Path, epoch_offset: int) -> list[Phase]:
    """Return all completed phases in ``path``; the monotonic clock is the Unix time minus ``epoch_offset`` nanoseconds.

    Raises:
        ValueError: the file is not a timeline.
    """
    events = _events(path.read_text())
    names: dict[int, str] = {}
    open_phases: dict[int, list[tuple[str, int]]] = {}
    epoch_start: int | None = None
    phases = []
    for event in events:
        tensor = event.get("pid", -1)
        if event["ph"] == "M":
            arguments = event.get("args", {})
            epoch_start = arguments.get("start_time_since_epoch_in_micros", epoch_start)
            if event["name"] == "process_name" and "name" in arguments:
                names[tensor] = arguments["name"]
            continue
        if epoch_start is None:
            raise ValueError(f"{path.name}: has no start time")
        at = (epoch_start + event.get("ts", 0)) * 1000 - epoch_offset
        if event["ph"] == "B":
            open_phases.setdefault(tensor, []).append((event["name"], at))
        elif event["ph"] == "E" and open_phases.get(tensor):
            name, start = open_phases[tensor].pop()
            phases.append(Phase(names.get(tensor, f"tensor {tensor}"), name, start, max(start, at)))
    return sorted(phases, key=lambda phase: phase.start)


def _events(text: str) -> list[TraceEvent]:
    """Return the events up to the last complete one."""
    text = text.strip().rstrip(",")
    complete = text.rfind("},") + 1
    for length, end in ((len(text), ""), (len(text), "]"), (len(text), "}]"), (complete, "]" if complete else "[]")):
        try:
            events: list[TraceEvent] = json.loads(text[:length] + end)
            return events
        except json.JSONDecodeError as error:
            problem = error
    raise ValueError(f"Horovod's timeline cannot be read: {problem}")
