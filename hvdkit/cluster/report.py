"""The report of a failure: which rank failed, where, at which step and why, for people and for ``hvdkit run``.

``hvdkit run`` never reads it from a rank's output, which may hold lines of other jobs. The wrapper around the rank
makes a pipe, and names it in a variable; the rank takes it when its world begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import asdict, dataclass, fields

from hvdkit.cluster.logs import last_line

# Holds "DESCRIPTOR INODE". A program that only inherits the variable has another file, or no file, at that number.
VARIABLE = "HVDKIT_RUN_REPORT"
_LONGEST_CAUSE = 2000


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """Why the job ends.

    Attributes:
        rank: the rank at fault.
        host: its host.
        verb: what it did, e.g. "failed", "hangs", "left the job".
        cause: why, in one line.
        step: its number of steps trained, or None if they are not counted.
        follows: the reporting rank fails only because another rank has left the job.
        died: only the end of the rank's connection is known; the process that started the rank knows more.
    """

    rank: int
    host: str
    verb: str
    cause: str
    step: int | None = None
    follows: bool = False
    died: bool = False

    @property
    def at(self) -> str:
        """Return the step in words, or an empty string."""
        return "" if self.step is None else f" at step {self.step}"

    @property
    def words(self) -> str:
        """Return the report without rank and host.

        Example:
            >>> FailureReport(rank=2, host="b", verb="failed", cause="ValueError: bad", step=7).words
            'failed at step 7: ValueError: bad'
        """
        return f"{self.verb}{self.at}: {self.cause}"

    def line(self) -> str:
        """Return the last line of the job."""
        return last_line(self.rank, self.host, self.verb, self.step, self.cause)

    def encode(self) -> bytes:
        """Return the report as JSON, in one line without its end."""
        return json.dumps(asdict(self) | {"cause": self.cause[:_LONGEST_CAUSE]}).encode()

    @staticmethod
    def decode(data: bytes) -> FailureReport | None:
        """Return the report that :meth:`encode` wrote, or None for other bytes."""
        try:
            record = json.loads(data)
            report = FailureReport(**record)
        except (ValueError, TypeError, RecursionError):
            return None
        return report if all(isinstance(getattr(report, f.name), _TYPES[str(f.type)]) for f in fields(report)) else None


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
    "int | None": (int, type(None)),
}


class _Pipe:
    """The pipe to the wrapper around this rank, once this process has taken it."""

    def __init__(self) -> None:
        self._file: int | None = None

    def take(self) -> None:
        """Take the pipe that the variable names, if it is open here; programs started from now on get neither."""
        number, _, inode = os.environ.pop(VARIABLE, "").partition(" ")
        if not number.isdigit() or not inode.isdigit():
            return
        with contextlib.suppress(OSError):
            found = os.fstat(int(number))
            if stat.S_ISFIFO(found.st_mode) and found.st_ino == int(inode):
                os.set_inheritable(int(number), False)
                self._file = int(number)

    def write(self, report: FailureReport) -> None:
        """Hand ``report`` to ``hvdkit run``, if it started this rank."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the wrapper is gone
                os.write(self._file, report.encode() + b"\n")

    def forget(self) -> None:
        """In a forked child: the pipe is its parent's."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


_pipe = _Pipe()
take_pipe = _pipe.take
hand_over = _pipe.write
os.register_at_fork(after_in_child=_pipe.forget)
