"""What rank 0 knows of each rank, and of what ends the job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvdkit.cluster import processes
from hvdkit.cluster.logs import last_line
from hvdkit.cluster.wire import Link


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

    @property
    def gone(self) -> bool:
        """It is not expected to answer any more."""
        return self.left or self.closed


@dataclass
class Fault:
    """Why the job ends: rank, cause, exit code; ``due`` is when it is settled that nobody else is at fault."""

    rank: Rank
    cause: str
    due: float
    verb: str = "failed"
    code: int = 1
    text: str = ""
    leaving: bool = False  # by sys.exit(n): no fault if all ranks do the same
    victim: bool = False
    kill: list[processes.Identity] = field(default_factory=list)

    def line(self) -> str:
        """Return the last line of the job."""
        return last_line(self.rank.number, self.rank.host, self.verb, self.rank.step, self.cause)
