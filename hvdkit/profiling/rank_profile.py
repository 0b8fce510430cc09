"""The data that one rank records during some steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class StepEnd(NamedTuple):
    """The end of a step."""

    step: int
    at: int


class Span(NamedTuple):
    """An activity of the training thread or a TensorFlow thread, from ``start`` to ``end``.

    ``kind`` is "input" or "save" for the training thread; "op" (computation) or "data" (part of tf.data's pipeline) for
    TensorFlow threads; ``track`` names the thread.
    """

    kind: str
    name: str
    track: str
    start: int
    end: int


class TimedCollective(NamedTuple):
    """A collective on this rank, from when the rank was ready for it to when it had the result.

    ``blocking``: the training thread waited, as for an eager collective; otherwise it was part of a graph.
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
class RankProfile:
    """The profile of one rank; times in nanoseconds, in this rank's monotonic clock until :meth:`shifted`."""

    rank: int
    host: str
    marks: list[StepEnd] = field(default_factory=list)  # starting with the step before the recording
    spans: list[Span] = field(default_factory=list)
    collectives: list[TimedCollective] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)  # Horovod's own timeline, if recorded; only on rank 0
    problems: list[str] = field(default_factory=list)  # messages about data that could not be recorded
    left_out: int = 0  # number of short ops that were dropped to limit the size of the trace
    clock_error: int = 0  # maximum error of its times relative to rank 0's clock

    def drop_short_ops(self, most: int, shortest: int = 0) -> None:
        """Keep the ``most`` longest ops of at least ``shortest`` nanoseconds; add the others to ``left_out``."""
        ops = [span for span in self.spans if span.kind in ("op", "data")]
        kept = [op for op in ops if op.end - op.start >= shortest]
        kept = sorted(kept, key=lambda op: op.start - op.end)[:most]
        self.spans = [span for span in self.spans if span.kind not in ("op", "data")] + kept
        self.left_out += len(ops) - len(kept)

    def shifted(self, offset: int, error: int) -> RankProfile:
        """Return the profile with ``offset`` subtracted from all times, and ``error`` as their maximum error."""
        return replace(
            self,
            marks=[m._replace(at=m.at - offset) for m in self.marks],
            spans=[s._replace(start=s.start - offset, end=s.end - offset) for s in self.spans],
            collectives=[c._replace(start=c.start - offset, end=c.end - offset) for c in self.collectives],
            phases=[p._replace(start=p.start - offset, end=p.end - offset) for p in self.phases],
            clock_error=error,
        )

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RankProfile:
        """Create a profile from its attributes, in which JSON has turned tuples into lists."""
        rows = {
            "marks": [StepEnd(*row) for row in document["marks"]],
            "spans": [Span(*row) for row in document["spans"]],
            "collectives": [TimedCollective(*row) for row in document["collectives"]],
            "phases": [Phase(*row) for row in document["phases"]],
        }
        return cls(**{**document, **rows})
