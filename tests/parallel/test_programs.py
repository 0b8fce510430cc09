"""Programs written for plain Keras: ported with three lines, they do on N ranks what they do in one process.

Each file of tests/programs runs twice: unchanged, with plain Keras in one process, and as its mechanical port
(tests/helpers/ports.py) on all ranks. History, weights, predictions, figures and files are compared.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pickle
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import pytest
import tensorflow as tf
from helpers import porting, ports
from keras.src.optimizers.base_optimizer import BaseOptimizer

import hvdkit as hk

TOLERANCE = 1e-4
# Half precision: sums in another order round differently.
TOLERANCES = {"mixed_float16": 2e-2, "mixed_bfloat16": 2e-2}
# These draw random numbers in the step, or normalize by a rank's rows: on one rank the History is equal, on several
# it is close.
CLOSE = {"diffusion": 0.2, "dropout": 0.2, "local_batchnorm": 0.2, "vae": 0.2}
# Run on other numbers of ranks, too: one rank, and splits that are uneven.
RANKS = {
    "callbacks": (1, 2),
    "own_train_step": (2, 3),
    "sequence_labelling": (2, 3),
    "sequential": (1, 2, 3),
    "synchronized_batchnorm": (2, 3),
    "uneven_batches": (2, 3),
}
# These differ from other programs in the network alone, or in what tests of one subject cover, e.g. of optimizers. The
# slowest of the others are in the nightly tier, too.
SLOW = {"generator", "own_compute_loss", "own_metrics", "sparse_input", "steps_per_epoch", "synchronized_batchnorm"}
NIGHTLY = SLOW | {
    "accumulation",
    "adversarial",
    "autoencoder",
    "compiled_by_xla",
    "contrastive",
    "convolutional",
    "custom_metric",
    "diffusion",
    "distillation",
    "dropout",
    "ema",
    "functional",
    "gru",
    "imbalanced",
    "lambda_callback",
    "language_model",
    "local_batchnorm",
    "lora",
    "lstm",
    "matrix_factorization",
    "mixed_bfloat16",
    "own_log_keys",
    "pseudo_labels",
    "quantiles",
    "ranking",
    "rate_schedule",
    "rate_scheduler",
    "regularizers",
    "retrieval",
    "run_eagerly",
    "sample_weights",
    "save_load_continue",
    "segmentation",
    "sequence_labelling",
    "shuffle_batches",
    "shuffled_dataset",
    "siamese",
    "structured_dataset",
    "subclassed",
    "time_series",
    "token_weights",
    "transformer",
    "triplets",
    "unknown_length",
    "vae",
    "weights_file",
    "wgan_gp",
}
CORE = {"own_train_step", "sequential", "uneven_batches", "wide_and_deep"}
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


# Keras counts the step in which data of unknown length end, as that part of the update needs no batch. With XLA it
# does not, in one process either, so these are compared with one process with XLA.
COUNTS_THE_END = {"unknown_length"}


def programs() -> list[Any]:
    """Return the programs as test parameters with marks."""
    mark = pytest.mark
    listed = []
    for name in ports.names():
        marks = [mark.nightly] * (name in NIGHTLY) + [mark.core(2)] * (name in CORE)
        listed.append(pytest.param(name, marks=[*marks, mark.ranks(*RANKS.get(name, (2,)))]))
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


@contextlib.contextmanager
def compiled_by_xla() -> Iterator[None]:
    """Make plain Keras compile all models with XLA."""
    compile_model = keras.Model.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.Model, "compile", functools.partialmethod(compile_model, jit_compile=True))
        yield


class Plain:
    """The plain programs. When one is requested, each rank runs one: the requested program and those after it.

    Attributes:
        folder: the programs' outcomes and files, in one subfolder per program. All launches of a run share it.
    """

    def __init__(self, names: list[str], folder: Path, *, jit_compile: bool = False) -> None:
        self._left = names
        self.folder = folder
        self._jit_compile = jit_compile
        self._outcomes: dict[str, Outcome] = {}

    def with_xla(self, name: str) -> Plain:
        """Return one program, which XLA compiles."""
        folder = self.folder / "xla"
        folder.mkdir(exist_ok=True)
        return Plain([name], folder, jit_compile=True)

    def of(self, name: str) -> Outcome:
        """Return a program's outcome. Every rank must call it."""
        if name not in self._outcomes:
            first = self._left.index(name)
            group = self._left[first : first + hk.size()]
            self._left = [other for other in self._left if other not in group]
            mine = self._outcome(group[hk.rank()]) if hk.rank() < len(group) else None
            self._outcomes |= dict(zip(group, hk.allgather_object(mine), strict=False))
        return self._outcomes[name]

    def _outcome(self, name: str) -> Outcome:
        """Return the outcome of an earlier launch, or run the program."""
        kept = self.folder / name / "outcome.pickle"
        if not kept.exists():
            made = Path(tempfile.mkdtemp(dir=self.folder))
            with contextlib.ExitStack() as stack:
                if name in REPEATED_ROWS:
                    stack.enter_context(summed_rows())
                if self._jit_compile:
                    stack.enter_context(compiled_by_xla())
                outcome = run(name, ports.PROGRAMS / f"{name}.py", made / "files")
            (made / kept.name).write_bytes(pickle.dumps(outcome))
            with contextlib.suppress(OSError):  # another launch has written it at the same time
                made.rename(kept.parent)
        return pickle.loads(kept.read_bytes())


@pytest.fixture(scope="module")
def plain(request, tmp_path_factory) -> Plain:
    """Return the plain forms of the selected programs."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    records = os.environ.get("HVDKIT_TEST_RECORDS")  # the launch's folder in the run's folder
    folder = Path(records).parent / "plain" if records else tmp_path_factory.mktemp("plain")
    folder = Path(hk.broadcast_object(str(folder)))
    folder.mkdir(exist_ok=True)
    return Plain(list(dict.fromkeys(item.callspec.params["name"] for item in items)), folder)


@pytest.mark.nightly(1)
@pytest.mark.parametrize("name", programs())
def test_the_port_equals_one_process(name, plain, shared_path):
    assert_port_equals_one_process(name, plain, shared_path)


@pytest.mark.nightly
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ports.names())
def test_the_port_compiled_by_xla_equals_one_process(name, plain, shared_path, monkeypatch):
    logger = logging.getLogger("hvdkit")
    lines = Lines()
    monkeypatch.setenv("HVDKIT_JIT_COMPILE", "on")
    logger.addHandler(lines)
    try:
        expected = plain.with_xla(name) if name in COUNTS_THE_END else plain
        largest = assert_port_equals_one_process(name, expected, shared_path)
    finally:
        logger.removeHandler(lines)
    if hk.is_chief() and (table := os.environ.get("COMPILED_PROGRAMS")):  # read by tools/compiled_programs.py
        with Path(table).open("a") as file:
            file.write(json.dumps({"name": name, "largest": largest, "lines": lines.texts}) + "\n")


class Lines(logging.Handler):
    """Keeps what hvdkit logs.

    Attributes:
        texts: the messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.texts.append(record.getMessage())


def assert_port_equals_one_process(name: str, plain: Plain, shared_path: Path) -> float:
    """Run a program's port on all ranks, compare it with the plain program, and return the largest difference."""
    outcome = plain.of(name)
    if outcome.error:
        pytest.fail(f"the plain program failed:\n{outcome.error}")
    script = shared_path / f"{name}.py"
    if hk.is_chief():
        script.write_text(ports.port(ports.source(name)).text)
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
    comparison.folders(shared_path / "files", plain.folder / name / "files")
    print(f"largest difference: {comparison.largest:.2g}")
    assert not comparison.problems, "\n".join(comparison.problems)
    return comparison.largest
