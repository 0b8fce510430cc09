"""The measurements of a model on a cluster: ``hvdkit tune`` saves them, ``hvdkit plan`` predicts from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from hvdkit._version import __version__
from hvdkit.cluster.tuned import FORMAT_VERSION, invalid_file, read_file


class Gradient(NamedTuple):
    """The dense gradient of one variable, in the order of the model's variables.

    Attributes:
        nbytes: its bytes on the wire.
        ready: the time at which it is computed, as a fraction of the step's computation, 0 to 1.
    """

    nbytes: int
    ready: float


class TimedAllreduce(NamedTuple):
    """The seconds of an allreduce of ``nbytes`` over ``ranks`` otherwise idle ranks."""

    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements of a model on a cluster.

    Attributes:
        model: name of the model.
        batch: examples per step on each rank.
        ranks: number of ranks in the measurement.
        local_ranks: number of these ranks on one host.
        compute_alone: seconds of a step without communication if only one rank runs.
        compute_together: the same while all ranks compute.
        spread: standard deviation of a rank's step, seconds.
        gradients: the dense gradients, in the order of variables.
        row_bytes: bytes that a rank sends per step to look up and update rows of sharded tables, including to itself.
        row_exchanges: alltoalls per step.
        copy: seconds to copy one byte, e.g. into or out of Horovod's buffer.
        exchanges: timed allreduces.
        settings: the best environment variables.
        version: version of hvdkit.
    """

    model: str
    batch: int
    ranks: int
    local_ranks: int
    compute_alone: float
    compute_together: float
    spread: float
    gradients: tuple[Gradient, ...]
    row_bytes: int = 0
    row_exchanges: int = 0
    copy: float
    exchanges: tuple[TimedAllreduce, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
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
            document["gradients"] = tuple(Gradient(*row) for row in document["gradients"])
            document["exchanges"] = tuple(TimedAllreduce(*row) for row in document["exchanges"])
            return cls(**document)
        except (KeyError, TypeError) as error:
            raise invalid_file(path, f"lacks a part ({error})") from None
