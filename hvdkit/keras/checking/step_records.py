"""What training steps have computed: samples of gradients and variables, losses and metrics, kept in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RECORD_VARIABLE = "HVDKIT_RECORD_STEPS"
"""With ``STEPS:FILE``, the first ``hk.fit`` of a program records its steps in a file, and ends the program; with
``STEPS:FILE:START``, it starts with the variables of the recording in another file."""
_SAMPLES = 16_384  # values that are kept of each array


class RecordedArray(NamedTuple):
    """Values of a variable or a gradient: samples at equal distances, and the sum of all.

    Attributes:
        values: float64 ``[n]``.
        is_half: whether they have 16 bits.
    """

    values: np.ndarray
    is_half: bool

    @classmethod
    def of(cls, array: np.ndarray, is_half: bool = False) -> RecordedArray:
        """Return the samples of an array of numbers of any shape."""
        flat = np.ravel(np.asarray(array, np.float64))
        step = max(1, flat.size // _SAMPLES)
        rest = [flat.sum() / math.sqrt(flat.size)] if step > 1 else []
        return cls(np.concatenate([flat[::step], rest]), is_half)


@dataclass
class StepRecord:
    """What a training step has computed.

    Attributes:
        numbers: the loss and the metrics since the first step, by name.
        gradients: gradients of the global batch, by the name of the variable.
        variables: values after the step of what is trained.
        states: values after the step of the other variables.
    """

    numbers: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, RecordedArray] = field(default_factory=dict)
    variables: dict[str, RecordedArray] = field(default_factory=dict)
    states: dict[str, RecordedArray] = field(default_factory=dict)


@dataclass
class Recording:
    """The first steps of a training.

    Attributes:
        ranks: number of ranks.
        steps: the steps.
        first_rows: a digest of the first rows of the data; empty if unknown.
        draws: the random operations in a step, which draw other numbers on each rank.
        silenced: the layers whose random numbers were switched off.
        local_normalizations: BatchNormalization layers that use the rows of their rank.
        not_compared: variables of which each rank has its own part.
        initial: the variables before the first step, to start other runs with.
    """

    ranks: int
    steps: list[StepRecord] = field(default_factory=list)
    first_rows: str = ""
    draws: list[str] = field(default_factory=list)
    silenced: list[str] = field(default_factory=list)
    local_normalizations: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    initial: dict[str, np.ndarray] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the recording to a file; it exists when it is complete."""
        arrays: dict[str, Any] = {}  # np.ndarray; keywords of np.savez, which has others for its options

        def stored(values: np.ndarray) -> str:
            arrays[name := f"a{len(arrays)}"] = values
            return name

        def of(recorded: Mapping[str, RecordedArray]) -> dict[str, tuple[str, bool]]:
            return {name: (stored(each.values), each.is_half) for name, each in recorded.items()}

        index = {
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
            "initial": {name: stored(array) for name, array in self.initial.items()},
            "steps": [[step.numbers, of(step.gradients), of(step.variables), of(step.states)] for step in self.steps],
        }
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(file, index=np.array(json.dumps(index)), **arrays)
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a recording that :meth:`save` has written."""
        with np.load(path) as arrays:
            index = json.loads(str(arrays["index"]))

            def of(recorded: Mapping[str, tuple[str, bool]]) -> dict[str, RecordedArray]:
                return {name: RecordedArray(arrays[key], is_half) for name, (key, is_half) in recorded.items()}

            steps = [StepRecord(numbers, *map(of, parts)) for numbers, *parts in index["steps"]]
            initial = {name: arrays[key] for name, key in index["initial"].items()}
        return cls(steps=steps, initial=initial, **{name: index[name] for name in _PLAIN_FIELDS})


_PLAIN_FIELDS = ("ranks", "first_rows", "draws", "silenced", "local_normalizations", "not_compared")
