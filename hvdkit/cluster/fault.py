"""What rank 0 knows of each rank, and of what ends the job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvdkit.cluster.report import FailureReport
from hvdkit.cluster.wire import Link
from hvdkit.machine import processes


@dataclass
class Rank:
    """What rank 0 knows of a rank."""

    number: int
    host: str
    link: Link
    identity: processes.Identity
    heard: float
    seen: float  # alive: it has spoken, or one beside it has looked
    joined: bool = False  # it knows that it was let in
    step: int | None = None
    idle: float = 0.0  # seconds for which nothing has moved there
    left: bool = False
    closed: bool = False
    asked: float | None = None  # when another rank was asked to look at it
    told: dict[str, Any] = field(default_factory=dict)
    busy: str | None = None  # the reason of an open hk.busy()
    unwound: bool = False  # after a failure: its files are flushed, and it may end


@dataclass
class Fault:
    """Why the job ends: rank, cause, exit code; ``due`` is when it is settled that no other rank is at fault.

    ``orderly`` says that every process still runs, so that interpreters can exit normally; ``died`` that only the end
    of a connection is known.
    """

    rank: Rank
    cause: str
    due: float
    verb: str = "failed"
    code: int = 1
    text: str = ""
    leaving: bool = False  # by sys.exit(n): no fault if all ranks do the same
    victim: bool = False
    orderly: bool = False
    died: bool = False
    kill: list[processes.Identity] = field(default_factory=list)

    def report(self) -> FailureReport:
        """Return what ``hvdkit run``, and the last line of the job, say of it."""
        cause = f"{self.cause} (busy: {self.rank.busy})" if self.rank.busy else self.cause
        return FailureReport(
            rank=self.rank.number,
            host=self.rank.host,
            verb=self.verb,
            cause=cause,
            step=self.rank.step,
            follows=self.victim,
            died=self.died,
        )
