"""Programs written for plain Keras: the port in three lines does on N ranks what one process does.

Each file of tests/programs runs twice: as it is, with plain Keras in one process, and as its mechanical port
(tests/porting.py) on all ranks. History, weights, predictions, figures and files are compared.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import porting
import pytest
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

import hvdkit as hk

TOLERANCE = 1e-4
# Rounding of other sums: half precision.
TOLERANCES = {"mixed_float16": 2e-2, "mixed_bfloat16": 2e-2}
# These draw random numbers in the step, or normalise by a rank's own rows: equal on one rank, on several the History
# comes close.
CLOSE = {"diffusion": 0.2, "dropout": 0.2, "local_batchnorm": 0.2, "vae": 0.2}
# On 1 and 4 ranks, too.
CONTRACT = {
    "callbacks",
    "dropout",
    "gan",
    "own_train_step",
    "sequence_labelling",
    "sequential",
    "synchronized_batchnorm",
    "uneven_batches",
}
# The rows of a table repeat in a batch, and the optimizer is not linear in gradients. hvdkit sums a row's gradients
# before the update, as for a dense gradient. Plain Keras squares them one by one; here it is made to sum them, too.
REPEATED_ROWS = {
    "language_model",
    "lora",
    "lstm",
    "matrix_factorization",
    "multiple_outputs",
    "ragged",
    "ranking",
    "retrieval",
    "wide_and_deep",
}


def programs() -> list[Any]:
    """Return the programs as parameters of a test, with their marks."""
    listed = []
    for name in porting.names():
        marks = [pytest.mark.contract] if name in CONTRACT else []
        listed.append(pytest.param(name, marks=marks))
    return listed


class Outcome(NamedTuple):
    """What a program left, or the traceback of its failure."""

    result: dict[str, Any]
    error: str = ""


def run(name: str, script: Path, folder: Path) -> Outcome:
    """Run a script in ``folder``."""
    before = Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    try:
        return Outcome(porting.execute(name, script))
    except Exception:
        return Outcome({}, traceback.format_exc())
    finally:
        os.chdir(before)


@contextlib.contextmanager
def summed_rows() -> Iterator[None]:
    """Have plain Keras sum the gradients of rows that repeat."""
    original = BaseOptimizer.apply

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        dense = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        original(self, dense, trainable_variables)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseOptimizer, "apply", apply)
        yield


class Plain:
    """The plain forms of programs. When one is asked for, each rank runs one: that, and those that follow it.

    Attributes:
        folder: of their files, each in one of its name.
    """

    def __init__(self, names: list[str], folder: Path) -> None:
        self._left, self.folder = names, folder
        self._outcomes: dict[str, Outcome] = {}

    def of(self, name: str) -> Outcome:
        """Return what a program left. Every rank calls it."""
        if name not in self._outcomes:
            first = self._left.index(name)
            group = self._left[first : first + hk.size()]
            self._left = [other for other in self._left if other not in group]
            mine = self._run(group[hk.rank()]) if hk.rank() < len(group) else None
            self._outcomes |= dict(zip(group, hk.allgather_object(mine), strict=False))
        return self._outcomes[name]

    def _run(self, name: str) -> Outcome:
        with summed_rows() if name in REPEATED_ROWS else contextlib.nullcontext():
            return run(name, porting.PROGRAMS / f"{name}.py", self.folder / name)


@pytest.fixture(scope="module")
def plain(request, tmp_path_factory) -> Plain:
    """The plain forms of the selected programs."""
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    names = [item.callspec.params["name"] for item in items if "name" in item.callspec.params]
    return Plain(names, Path(hk.broadcast_object(str(tmp_path_factory.mktemp("plain")))))


@pytest.mark.parametrize("name", programs())
def test_the_port_equals_one_process(name, plain, shared_path):
    outcome = plain.of(name)
    if outcome.error:
        pytest.fail(f"the plain program failed:\n{outcome.error}")
    script = shared_path / f"{name}.py"
    if hk.is_chief():
        script.write_text(porting.port(porting.source(name)).text)
    hk.barrier()
    ours = run(name, script, shared_path / "files")

    errors, digests = zip(*hk.allgather_object((ours.error, porting.digest(ours.result))), strict=True)
    failed = [f"rank {rank} failed:\n{error}" for rank, error in enumerate(errors) if error]
    assert not failed, "\n".join(failed)
    assert len(set(digests)) == 1, "the ranks' results differ"

    expected = outcome.result
    if name in CLOSE and hk.size() > 1:
        comparison = porting.Comparison(CLOSE[name])
        comparison.values(ours.result["history"], expected["history"])
    else:
        comparison = porting.Comparison(TOLERANCES.get(name, TOLERANCE))
        comparison.values(ours.result, expected)
    comparison.folders(shared_path / "files", plain.folder / name)
    print(f"largest difference: {comparison.largest:.2g}")
    assert not comparison.problems, "\n".join(comparison.problems)
