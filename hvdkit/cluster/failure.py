"""One rank that raises ends the whole job, and says who failed and why in one last line."""

from __future__ import annotations

import socket
import sys
import traceback
from types import TracebackType
from typing import Any

from hvdkit.cluster.logs import write_line

_previous_hook: Any = None


def watch(rank: int, size: int, communicator: Any) -> None:
    """From now on an uncaught exception on this rank ends all ranks.

    The traceback is written in one piece, then a line that names rank, host and cause. Under MPI the world is
    aborted: a rank that merely exited would wait in ``MPI_Finalize`` for peers that wait for it. Without MPI the
    process exits, which shuts Horovod down on every rank.
    """
    global _previous_hook
    if _previous_hook is not None or size == 1:
        return
    _previous_hook = sys.excepthook

    def end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt)
        lines = [] if interrupted else "".join(traceback.format_exception(kind, error, trace)).splitlines()
        cause = "interrupted" if interrupted else f"failed: {kind.__name__}: {_cause(error)}"
        lines.append(f"hvdkit: rank {rank} on {socket.gethostname()} {cause}")
        write_line("\n".join(f"[rank {rank}] {line}" for line in lines))
        if communicator is not None:
            sys.stdout.flush()
            communicator.Abort(130 if interrupted else 1)

    sys.excepthook = end_job


def _cause(error: BaseException) -> str:
    """Return the one line of an error's message that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    if any("has been shut down" in line for line in lines):
        return "another rank left the job, and its own lines say why"
    # TensorFlow puts the cause below "Graph execution error:" and a list of the places it passed through.
    told = [line for line in lines if not line.startswith(("Graph execution error", "Detected at", "File "))]
    return told[0] if lines[0] in told or not told else told[-1]


def unwatch() -> None:
    """Give back the hook that :func:`watch` replaced."""
    global _previous_hook
    if _previous_hook is not None:
        sys.excepthook = _previous_hook
        _previous_hook = None
