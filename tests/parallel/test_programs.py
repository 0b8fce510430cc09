"""Programs written for plain Keras: ported with three lines, they do on N ranks what they do in one process.

Each file of tests/programs runs twice: unchanged, with plain Keras in one process, and as its mechanical port
(tests/helpers/porting.py) on all ranks. History, weights, predictions, figures and files are compared.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tensorflow as tf
from helpers import porting
from keras.src.optimizers.base_optimizer import BaseOptimizer

import hvdkit as hk

TOLERANCE = 1e-4
# Half precision: sums in another order round differently.
TOLERANCES = {"mixed_float16": 2e-2, "mixed_bfloat16": 2e-2}
# These draw random numbers in the step, or normalize by a rank's rows: on one rank the History is equal, on several
# it is close.
CLOSE = {"diffusion": 0.2, "dropout": 0.2, "local_batchnorm": 0.2, "vae": 0.2}
# Run on 1, 3 and 4 ranks, too.
CONTRACT = {
    "callbacks",
    "dropout",
    "gan",
    "own_log_keys",
    "own_train_step",
    "rate_scheduler",
    "sequence_labelling",
    "sequential",
    "shuffled_dataset",
    "subclassed",
    "synchronized_batchnorm",
    "uneven_batches",
}
# A table's rows repeat in a batch, and the optimizer is not linear in the gradients. hvdkit sums a row's gradients
# before the update, as for a dense gradient; plain Keras squares them one by one, unless patched here to sum them.
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
    """Return the programs as test parameters with marks."""
    listed = []
    for name in porting.names():
        marks = [pytest.mark.contract] if name in CONTRACT else []
        listed.append(pytest.param(name, marks=marks))
    return listed


class Outcome(NamedTuple):
    """A program's results, or the traceback of its failure."""

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
    """Make plain Keras sum the gradients of repeated rows."""
    original = BaseOptimizer.apply

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        dense = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        original(self, dense, trainable_variables)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseOptimizer, "apply", apply)
        yield


class Plain:
    """The plain programs. When one is requested, each rank runs one: the requested program and those after it.

    Attributes:
        folder: their files, in one subfolder per program.
    """

    def __init__(self, names: list[str], folder: Path) -> None:
        self._left, self.folder = names, folder
        self._outcomes: dict[str, Outcome] = {}

    def of(self, name: str) -> Outcome:
        """Return a program's outcome. Every rank must call it."""
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
    """Return the plain forms of the selected programs."""
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
