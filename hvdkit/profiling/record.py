"""What one rank has recorded of some steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """The end of a step."""

    step: int
    at: int


class Span(NamedTuple):
    """Something that the training thread, or a thread of TensorFlow's, did from ``start`` to ``end``.

    ``kind`` is "input" or "save" for the training thread; "op" (computes) or "data" (a part of tf.data's pipeline)
    for TensorFlow's; ``track`` names the thread.
    """

    kind: str
    name: str
    track: str
    start: int
    end: int


class Collective(NamedTuple):
    """A collective on this rank: from the moment when the rank was ready for it to the moment when it had the result.

    ``blocking``: the training thread itself waited, as for an eager collective; else it was a part of a graph.
    """

    name: str
    start: int
    end: int
    blocking: bool


class Phase(NamedTuple):
    """A phase of a tensor in Horovod's own timeline, e.g. MPI_ALLREDUCE."""

    tensor: str
    name: str
    start: int
    end: int


@dataclass
class Record:
    """What one rank has recorded; times in nanoseconds, by this rank's monotonic clock until :meth:`moved`.

    Attributes:
        rank: whose it is.
        host: where it ran.
        marks: the end of each step, the first one that of the step before the recording.
        spans: what its threads did.
        collectives: what it exchanged with other ranks.
        phases: Horovod's own timeline, where it was recorded: on rank 0 alone.
        problems: what could not be recorded, for people.
        left_out: number of short ops that were counted and then left out, lest the trace become too large.
        clock_error: nanoseconds by which its times may be wrong beside rank 0's.
    """

    rank: int
    host: str
    marks: list[Mark] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    left_out: int = 0
    clock_error: int = 0

    def moved(self, offset: int, error: int) -> Record:
        """Return the record with ``offset`` taken from all times, which are then right but for ``error``."""
        spans = [s._replace(start=s.start - offset, end=s.end - offset) for s in self.spans]
        collectives = [c._replace(start=c.start - offset, end=c.end - offset) for c in self.collectives]
        phases = [p._replace(start=p.start - offset, end=p.end - offset) for p in self.phases]
        marks = [m._replace(at=m.at - offset) for m in self.marks]
        moved = {"spans": spans, "collectives": collectives, "phases": phases, "marks": marks, "clock_error": error}
        return replace(self, **moved)  # type: ignore[arg-type]

    def as_json(self) -> dict[str, Any]:
        """Return it as lists and numbers."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Record:
        """Return the record that :meth:`as_json` made the document of."""
        kinds: dict[str, Callable[..., Any]] = {
            "marks": Mark,
            "spans": Span,
            "collectives": Collective,
            "phases": Phase,
        }
        read = {name: [kind(*row) for row in document[name]] for name, kind in kinds.items()}
        return cls(**{**document, **read})
