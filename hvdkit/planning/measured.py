"""What ``hvdkit tune`` has measured of a model on a cluster and keeps in a file: the ground of predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from hvdkit._version import __version__
from hvdkit.tuned import FORMAT_VERSION, read, wrong


class Gradient(NamedTuple):
    """The dense gradient of one variable, in the order of the model's variables.

    Attributes:
        nbytes: its bytes on the wire.
        ready: when it is computed, as a share of the step's computation, 0 to 1.
    """

    nbytes: int
    ready: float


class Exchange(NamedTuple):
    """A timed allreduce: bytes, and the seconds that it took between ``ranks`` ranks that did nothing else."""

    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model on a cluster.

    Attributes:
        model: its name.
        batch: examples of one rank's step.
        ranks: that were measured together.
        local_ranks: of them on one host.
        compute_alone: seconds of a step of one rank by itself, nothing exchanged.
        compute_together: the same while all ranks compute.
        spread: standard deviation of a rank's step, seconds.
        gradients: dense ones, in the order of variables.
        row_bytes: that a rank sends in a step to look up and update rows of sharded tables, itself included.
        row_exchanges: alltoalls in a step.
        copy: seconds that copying one byte takes, as into Horovod's buffer and out of it.
        exchanges: timed allreduces.
        settings: environment variables that were best.
        version: of hvdkit.
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
    exchanges: tuple[Exchange, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    version: str = __version__

    @property
    def gradient_bytes(self) -> int:
        """Of all dense gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)

    def save(self, path: Path) -> None:
        """Write it to a file."""
        text = json.dumps({"format": FORMAT_VERSION, **asdict(self)}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Measured:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: there is no such file, or it is another one.
        """
        found = read(path)
        try:
            found["gradients"] = tuple(Gradient(*each) for each in found["gradients"])
            found["exchanges"] = tuple(Exchange(*each) for each in found["exchanges"])
            return cls(**found)
        except (KeyError, TypeError) as error:
            raise wrong(path, f"lacks a part ({error})") from None
