"""What a rank is to measure, what it has measured, and the file that ``tune`` saves and ``plan`` predicts from."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from hvdkit._version import __version__
from hvdkit.cluster.tuned import FORMAT_VERSION, invalid_file, read_file

Document: TypeAlias = dict[str, Any]  # the fields of a dataclass of measurements, as JSON

BUCKET = "HVDKIT_BUCKET_BYTES"
CYCLE = "HOROVOD_CYCLE_TIME"


@dataclass(frozen=True, kw_only=True)
class MeasureRequest:
    """A request to the ranks of a job: what to measure."""

    model: str  # name of a built-in workload
    batch: int  # examples per step on each rank
    optimizer: str
    steps: int  # per measurement
    warm_up: int  # steps; there is one more before each measurement
    rounds: int  # measurements per setting; settings alternate
    buckets: Sequence[int | None] = ()  # values of HVDKIT_BUCKET_BYTES to time; None for that of the environment
    profiled: int = 0  # number of steps to run afterwards, for a profile
    compute: bool = False  # time steps without communication, and copies
    links: bool = False  # time allreduces


class Gradient(NamedTuple):
    """The dense gradient of one variable."""

    nbytes: int  # on the wire
    ready: float  # the time at which it is computed, as a fraction of the step's computation, 0 to 1


class TimedAllreduce(NamedTuple):
    """The seconds of an allreduce of ``nbytes`` over ``ranks`` otherwise idle ranks."""

    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """The measurement of one rank. What was not requested is empty or 0."""

    local_ranks: int  # number of ranks on this host
    threads: int  # that compute
    device: str  # "GPU" or "CPU"
    memory: int  # peak of the process, in bytes
    steps: Sequence[Sequence[Sequence[float]]]  # seconds of each, by bucket in the requested order, then by round
    collectives: int  # Horovod ops per step
    sent: int  # bytes that this rank passes to them per step
    has_rows: bool  # whether the model has sharded tables, whose rows are exchanged
    gradients: Sequence[Gradient]  # the dense ones, in the order of variables
    compute: Sequence[float]  # seconds of each step without communication
    copy: float  # seconds to copy one byte
    exchanges: Sequence[TimedAllreduce]

    @classmethod
    def from_json(cls, document: Document) -> RankMeasurement:
        """Return the measurement from JSON of ``asdict()``."""
        return cls(**_with_types(document))

    @property
    def row_exchanges(self) -> int:
        """Alltoalls of rows per step. The dense gradients of a model with tables are one collective."""
        return max(0, self.collectives - 1) if self.has_rows else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of rows that this rank sends per step."""
        return self.sent - sum(gradient.nbytes for gradient in self.gradients) if self.row_exchanges else 0


def slowest_steps(ranks: Sequence[RankMeasurement], setting: int = 0) -> list[list[float]]:
    """Return, for each round, the seconds of each step on the rank on which it took longest."""
    rounds = zip(*(rank.steps[setting] for rank in ranks), strict=True)
    return [[max(times) for times in zip(*one_round, strict=True)] for one_round in rounds]


def round_seconds(ranks: Sequence[RankMeasurement], setting: int = 0) -> list[float]:
    """Return the median seconds of a step in each round."""
    return [statistics.median(times) for times in slowest_steps(ranks, setting)]


def merge_jobs(jobs: Sequence[Sequence[RankMeasurement]]) -> list[RankMeasurement]:
    """Merge the rounds of several jobs that have measured the same on the same number of ranks."""
    return [
        replace(
            measured[0],
            steps=[list(itertools.chain(*rounds)) for rounds in zip(*(each.steps for each in measured), strict=True)],
            memory=max(each.memory for each in measured),
        )
        for measured in zip(*jobs, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements of a model on a cluster."""

    model: str
    batch: int  # examples per step on each rank
    ranks: int
    local_ranks: int  # number of ranks on one host
    compute_alone: float  # seconds of a step without communication if only one rank runs
    compute_together: float  # the same while all ranks compute
    spread: float  # standard deviation of a rank's step, seconds
    gradients: tuple[Gradient, ...]  # the dense ones, in the order of variables
    row_bytes: int = 0  # that a rank sends per step to look up and update rows of sharded tables, including to itself
    row_exchanges: int = 0  # alltoalls per step
    copy: float  # seconds to copy one byte, e.g. into or out of Horovod's buffer
    exchanges: tuple[TimedAllreduce, ...]
    settings: Mapping[str, str] = field(default_factory=dict)  # the best environment variables
    version: str = __version__

    @property
    def gradient_bytes(self) -> int:
        """Total bytes of the dense gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)

    def save(self, path: Path) -> None:
        """Write the measurements to a file."""
        text = json.dumps({"format": FORMAT_VERSION, **asdict(self)}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Measurements:
        """Read a file written by :meth:`save`.

        Raises:
            ValueError: the file does not exist, or is of another kind.
        """
        document = read_file(path)
        try:
            return cls(**_with_types(document))
        except (KeyError, TypeError) as error:
            raise invalid_file(path, f"lacks a part ({error})") from None


def _with_types(document: Document) -> Document:
    """Return fields from JSON, in which named tuples are lists."""
    gradients = tuple(Gradient(*row) for row in document["gradients"])
    exchanges = tuple(TimedAllreduce(*row) for row in document["exchanges"])
    return {**document, "gradients": gradients, "exchanges": exchanges}
