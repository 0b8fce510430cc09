"""The messages between ranks, sentinels and the coordinator: dataclasses, each sent as one JSON object.

Fields of several messages: ``step`` is the number of steps trained, or None if they are not counted; ``busy`` is the
reason of an open ``hk.busy``, or None.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from hvdkit.errors import printable
from hvdkit.watchdog.flight_recorder import CollectiveRecord

VERSION = 5  # of the whole set of messages, which the coordinator checks before it admits a sentinel


class Message:
    """Base class of messages. The JSON object includes the ``kind``, by default the name of the class."""

    kinds: ClassVar[dict[str, type[Message]]] = {}
    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.kind = kind or cls.__name__
        Message.kinds[cls.kind] = cls

    def encode(self) -> bytes:
        """Return the message as JSON."""
        return json.dumps({"kind": self.kind, **vars(self)}).encode()


def decode(data: bytes) -> Message:
    """Return the message encoded by :meth:`Message.encode`. Raises ValueError for anything else."""
    try:
        fields = json.loads(data)
        kind = Message.kinds[fields.pop("kind")]
        types = _types(kind.kind)
        return kind(**{name: _read(value, types[name]) for name, value in fields.items()})
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError("not a message of hvdkit's watchdog") from error


@cache
def _types(name: str) -> dict[str, Any]:
    """Return the type of each field. :func:`decode` checks them: a rank's child processes may write to its sentinel."""
    return get_type_hints(Message.kinds[name])


def _read(value: Any, kind: Any) -> object:
    """Convert a JSON value to type ``kind``. Raises TypeError for values of other types."""
    if type(value) is kind:
        return value
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is UnionType:
        return None if value is None else _read(value, arguments[0])
    if origin is list:
        return [_read(one, arguments[0]) for one in value]
    if kind is CollectiveRecord:
        return CollectiveRecord.from_json(value)
    if not isinstance(value, (int, float) if kind is float else origin or kind):
        raise TypeError(kind)
    return float(value) if kind is float else value


# ---- from a sentinel to the coordinator -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Joined(Message):
    """A sentinel has connected.

    Attributes:
        size: number of ranks, as the launcher passed it to this rank.
        place: identifies host, boot and container; equal for processes that can see each other.
    """

    rank: int
    size: int
    host: str
    place: str


@dataclass(frozen=True, kw_only=True)
class Training(Message):
    """The rank has called ``hk.init()``: from now on it reports errors itself, and exits normally on request.

    Attributes:
        pid: the rank's PID on its host.
        waiters: IDs of its threads whose CPU time is no progress (those of Horovod and MPI poll).
    """

    pid: int
    waiters: list[int] = field(default_factory=list)
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Status(Message):
    """State of the rank. Sent every few seconds; also serves as the sentinel's heartbeat.

    Attributes:
        idle: seconds since the rank last made progress.
        count: eager collectives begun in this world.
        stopped: seconds since the process was stopped (SIGSTOP), or None.
        waits: the eager collective in which the rank has waited for some seconds, or None.
        in_graph: collectives of a graph in which the rank has waited for some seconds without computing, by key.
        last: the last collective, if the rank has ended it some time ago.
        has_raised: whether the rank has completed no collective since its last :class:`Raised`.
        is_late: whether the rank's script has ended, and its exit takes longer than it may if no rank moves.
        now: host's monotonic clock when this was sent, in seconds.
    """

    step: int | None = None
    idle: float = 0.0
    count: int = 0
    stopped: float | None = None
    busy: str | None = None
    waits: CollectiveRecord | None = None
    in_graph: list[CollectiveRecord] = field(default_factory=list)
    last: str = ""
    has_raised: bool = False
    is_late: bool = False
    now: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Measured(Message):
    """Measurements of the rank for metrics, sent with each :class:`Status` if :class:`Welcome` requests them.

    Attributes:
        step_at: when the last step ended, by the host's monotonic clock in seconds.
        examples: rows of a global batch, on average, or None.
        loss: the last known loss, or None.
        saved_step: the step of the last complete save of this process, or None.
        saved_at: when it was complete, in seconds since 1970.
        save_seconds: how long it took.
        collectives: number of eager collectives so far.
        nbytes: bytes that this rank has sent in them.
        seconds: seconds that this rank has spent in them.
        step_seconds: seconds of a step in which collectives of its graph ran, as last seen; None if there are none.
        step_bytes: bytes that this rank sends in these.
    """

    step: int | None = None
    step_at: float = 0.0
    examples: float | None = None
    loss: float | None = None
    saved_step: int | None = None
    saved_at: float = 0.0
    save_seconds: float = 0.0
    collectives: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    step_seconds: float | None = None
    step_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Failed(Message):
    """The rank has failed with an uncaught exception.

    Attributes:
        cause: the error in one line.
        verb: what happened to the rank, e.g. "failed", "was interrupted".
        code: its exit code.
        text: the traceback.
        follows: whether the error was caused by the loss of another rank.
    """

    cause: str
    verb: str = "failed"
    code: int = 1
    text: str = ""
    follows: bool = False
    step: int | None = None
    busy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Raised(Message):
    """An exception has ended a step or a call of hvdkit; other ranks may still be inside it. The program may catch it.

    Attributes:
        cause: the error in one line.
        text: the traceback.
    """

    cause: str
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Saved(Message):
    """What the rank's run has saved. Sent when a session begins, and after each save.

    Attributes:
        logdir: the run's folder.
        step: the step of the newest checkpoint; None without one.
    """

    logdir: str
    step: int | None = None

    @property
    def text(self) -> str:
        """Where the same command continues.

        Example:
            >>> Saved(logdir="runs/x", step=92).text
            'saved at step 92 in runs/x: the same command continues from there'
        """
        logdir = printable(self.logdir)
        if self.step is None:
            return f"nothing was saved yet in {logdir}: the same command starts from the beginning"
        return f"saved at step {self.step} in {logdir}: the same command continues from there"


@dataclass(frozen=True, kw_only=True)
class Leaving(Message):
    """The rank's script has ended, or it has called ``hk.shutdown()``. Its process waits for :class:`Release`.

    Attributes:
        keeps_horovod: this rank keeps Horovod running until the release, because process sets without it, or a profile,
            may still need it: if one rank shuts Horovod down, it stops on all ranks.
    """

    step: int | None = None
    keeps_horovod: bool = False


@dataclass(frozen=True, kw_only=True)
class Exiting(Message):
    """What the rank does after the end of its script.

    Attributes:
        doing: e.g. "Horovod is shutting down".
        seconds: limit for it; 0: none.
        patience: limit for handlers without progress; 0: none.
        is_bounded: whether the job ends at the limit. Otherwise only stacks are written: the rank may run handlers of
            the user, and these may take long.
    """

    rank: int
    doing: str
    seconds: float
    is_bounded: bool
    patience: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Unwound(Message):
    """After :class:`End`: the rank's script and handlers have ended, and its files are flushed."""


@dataclass(frozen=True, kw_only=True)
class Exited(Message):
    """The rank's process has ended.

    Attributes:
        code: its exit code, negative for a signal. None if unknown: the rank was killed or called ``os._exit``, and the
            sentinel is not its parent.
        signals: signals from processes other than hvdkit's, forwarded by the sentinel in the rank's last minute.
        stopped: seconds for which the process had been stopped before it was killed for that, or None.
    """

    code: int | None
    step: int | None = None
    busy: str | None = None
    signals: list[int] = field(default_factory=list)
    stopped: float | None = None


@dataclass(frozen=True, kw_only=True)
class Stacks(Message):
    """The Python stacks of a rank's threads, and the source line of the training thread."""

    text: str
    where: str = ""
    waiting: bool = False


@dataclass(frozen=True, kw_only=True)
class Flight(Message):
    """The last collectives of a rank, in order."""

    records: list[CollectiveRecord]


# ---- from a rank to its own sentinel --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Connect(Message):
    """Join the coordinator in the sentinel of rank 0.

    Attributes:
        offer: the coordinator's addresses and the job's token; "": this sentinel runs the coordinator.
        chief_host: the host of rank 0.
        speaks: this rank writes the last line if the sentinel of rank 0 is gone.
    """

    rank: int
    size: int
    host: str
    offer: str
    chief_host: str
    speaks: bool

    @classmethod
    def of(cls, rank: int, hosts: Sequence[str], places: Sequence[str], offer: str) -> Connect:
        """Return the message of a rank, given the host and the place of each rank."""
        elsewhere = (other for other, place in enumerate(places) if place != places[0])
        speaks = rank == next(elsewhere, 1)
        return cls(rank=rank, size=len(hosts), host=hosts[rank], offer=offer, chief_host=hosts[0], speaks=speaks)


@dataclass(frozen=True, kw_only=True)
class Busy(Message):
    """The rank begins work that is not visible from outside (``hk.busy``), or ends it (no ``reason``)."""

    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Sampled(Message):
    """The answer to :class:`GiveFlight`: the rank has recorded the pending collectives of its graphs."""


@dataclass(frozen=True, kw_only=True)
class Left(Message):
    """The process continues but is no longer a rank (``hk.shutdown``)."""


# ---- from a sentinel to its rank ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Watching(Message):
    """The sentinel's PID, with which the rank detects that its sentinel is stopped."""

    pid: int


# ---- from the coordinator to a sentinel -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    """The answer to :class:`Joined`.

    Attributes:
        heartbeat: seconds of silence after which a sentinel counts as lost.
        interval: seconds between two :class:`Status` messages.
        program: command, environment and terminal of the program to start; only from ``hvdkit run``.
        measures: whether to send :class:`Measured`.
    """

    heartbeat: float
    interval: float
    program: dict[str, object] | None = None
    measures: bool = False


@dataclass(frozen=True, kw_only=True)
class Refused(Message):
    """The answer to :class:`Joined` from a sentinel that is rejected."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Signal(Message):
    """Send a signal to the rank's program."""

    number: int


@dataclass(frozen=True, kw_only=True)
class GiveStacks(Message):
    """Answer with :class:`Stacks`."""


@dataclass(frozen=True, kw_only=True)
class GiveFlight(Message):
    """Answer with :class:`Flight`, of at most ``most`` collectives."""

    most: int


@dataclass(frozen=True, kw_only=True)
class WriteLine(Message):
    """Write a line for the user to the rank's standard error."""

    text: str


@dataclass(frozen=True, kw_only=True)
class HoldOutput(Message):
    """Stop reading the program's output because the reader of ``hvdkit run`` has paused; or resume (``hold=False``)."""

    hold: bool


@dataclass(frozen=True, kw_only=True)
class End(Message):
    """The job has failed: end the rank.

    Attributes:
        code: exit code of the job.
        unwind: seconds to exit normally; 0: end it immediately.
        line: which rank failed, and why.
        finalize: finalize MPI after :class:`Unwound`. A rank whose script has ended waits for that, and its exit code
            is known only afterwards.
    """

    code: int
    unwind: float = 0.0
    line: str = ""
    finalize: bool = False


@dataclass(frozen=True, kw_only=True)
class Release(Message):
    """All ranks are leaving or have unwound: the rank may exit, and then its sentinel.

    Attributes:
        code: exit code of the job, if it has failed.
        all_leave: the scripts of all ranks have ended.
    """

    code: int | None = None
    all_leave: bool = False
