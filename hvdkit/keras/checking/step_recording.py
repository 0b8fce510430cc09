"""Record what the first steps of Keras's ``fit`` compute, in one process or on many ranks, to compare them.

``hvdkit check`` sets an environment variable: the first ``hk.fit`` of the program then records its steps, and ends the
program. ``hk.check_step`` records within a program.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.graphs import TRUE_AT_RUN_TIME
from hvdkit.keras.attribute_swap import swap_attributes
from hvdkit.keras.checking.step_records import RECORD_VARIABLE, RecordedArray, Recording, StepRecord
from hvdkit.keras.model_optimizers import all_optimizers
from hvdkit.keras.rank_functions import FirstRows
from hvdkit.keras.rank_state import untracked_variables
from hvdkit.keras.unchanged_models import in_inference, is_augmentation
from hvdkit.optimizer.inner_optimizers import updaters_of
from hvdkit.sharding.shards import AnyVariable, holding_of, is_seed_state

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Tensors

_HALF = ("float16", "bfloat16")
_MAX_GRADIENT = 2**27  # elements of a gradient that is recorded
# Attributes of Keras's layers that switch random numbers on.
_RATES = ("rate", "stddev", "dropout", "recurrent_dropout")
_RANDOM_LAYERS = (
    keras.layers.Dropout,
    keras.layers.SpatialDropout1D,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
    keras.layers.AlphaDropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.LSTMCell,
    keras.layers.GRUCell,
    keras.layers.SimpleRNNCell,
)


class StepRecorder(keras.callbacks.Callback):
    """Callback that records the steps of a ``fit``. Enter :meth:`observing` before.

    Args:
        steps: number of steps.
        path: file for the recording, after which the program ends; None to keep it in :attr:`recording`.
        start: a recording whose variables the chief starts with.
    """

    def __init__(self, steps: int, path: Path | None = None, start: Recording | None = None) -> None:
        super().__init__()
        self.recording = Recording(cluster.size())
        self._steps = steps
        self._path = path
        self._start = start
        self._first_rows = FirstRows()
        self._gradients: dict[str, RecordedArray] = {}
        self._names: dict[int, str] = {}  # of the model's variables, in the step that is being traced
        self._is_half = False

    @classmethod
    def from_environment(cls) -> StepRecorder | None:
        """Return a recorder as ``HVDKIT_RECORD_STEPS`` requests, or None."""
        steps, _, paths = os.environ.get(RECORD_VARIABLE, "").partition(":")
        path, _, start = paths.partition(":")
        if not steps:
            return None
        return cls(int(steps), Path(path), Recording.load(Path(start)) if start else None)

    @contextlib.contextmanager
    def observing(self, model: keras.Model) -> Iterator[None]:
        """Record the steps of ``model`` that are traced inside; switch off Keras's dropout and augmentation layers."""
        layers = list(model._flatten_layers())
        self._is_half = any(getattr(layer, "compute_dtype", None) in _HALF for layer in layers)
        self.recording.local_normalizations = [
            layer.name
            for layer in layers
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not layer.synchronized
        ]
        with contextlib.ExitStack() as stack:
            for layer in layers:
                values = {name: vars(layer).get(name) for name in _RATES}
                rates = {name: 0.0 for name, value in values.items() if isinstance(value, float) and value > 0}
                if rates and isinstance(layer, _RANDOM_LAYERS):
                    stack.enter_context(swap_attributes(layer, **rates))
                    self.recording.silenced.append(layer.name)
                elif is_augmentation(layer):
                    stack.enter_context(in_inference(layer))
                    self.recording.silenced.append(layer.name)
            step = self._observed(model, model.train_step)
            stack.enter_context(swap_attributes(model, train_step=step, _jit_compile=False))  # as on several ranks
            yield

    def _observed(self, model: keras.Model, step: Callable[[Tensors], object]) -> Callable[[Tensors], object]:
        def train_step(data: Tensors) -> object:
            self._names.clear()
            self._first_rows.observe(data, 1)
            with contextlib.ExitStack() as stack:
                for optimizer in _optimizers(model):
                    stack.enter_context(swap_attributes(optimizer, update_step=self._recorded(optimizer.update_step)))
                logs = step(data)
            self.recording.draws = _random_operations(model, self.recording.silenced)
            return logs

        return train_step

    def _recorded(self, update: Callable[..., object]) -> Callable[..., object]:
        def update_step(
            gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable, learning_rate: tf.Tensor
        ) -> object:
            if not self._names:  # the first step may have built the model
                self._names = {id(getattr(v, "_value", v)): name for name, v in self._variables()}
            name = self._names.get(id(getattr(variable, "_value", variable)), getattr(variable, "path", variable.name))
            if holding_of(variable) is None and int(np.prod(variable.shape)) <= _MAX_GRADIENT:
                self._record_gradient(name, tf.convert_to_tensor(gradient))
            return update(gradient, variable, learning_rate)

        return update_step

    def _record_gradient(self, name: str, gradient: tf.Tensor) -> None:
        reference = weakref.ref(self)  # TensorFlow never frees a numpy_function

        def store(array: np.ndarray) -> None:
            recorder = reference()
            if recorder is not None:
                recorder._gradients[name] = RecordedArray.of(array, recorder._is_half)

        tf.numpy_function(store, [tf.cast(gradient, tf.float32)], [])

    # ---- hooks --------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Start with the variables of another recording, on the chief, whose variables all ranks get."""
        if self._start is not None:
            for name, variable in self._variables():
                if name in self._start.initial and self._start.initial[name].shape == tuple(variable.shape):
                    variable.assign(self._start.initial[name])

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Keep the variables before the first step."""
        if not self.recording.steps and not self.recording.initial:
            self.recording.initial = {name: np.asarray(v).copy() for name, v in self._variables()}

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Record a step; after the last one, end the program if a file is requested."""
        names = {id(v) for v in self.model.trainable_variables}
        arrays = {name: np.asarray(value) for name, value in (logs or {}).items()}
        numbers = {name: each for name, each in arrays.items() if each.ndim == 0 and each.dtype.kind not in "OSU"}
        step = StepRecord({name: float(each) for name, each in numbers.items()})
        for name, variable in self._variables():
            is_half = self._is_half or variable.dtype in _HALF
            recorded = RecordedArray.of(np.asarray(tf.cast(tf.convert_to_tensor(variable), tf.float64)), is_half)
            (step.variables if id(variable) in names else step.states)[name] = recorded
        step.gradients = self._gradients
        self._gradients = {}
        self.recording.steps.append(step)
        if len(self.recording.steps) == self._steps:
            self._finish()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """End the program if there were fewer steps."""
        self._finish()

    def _finish(self) -> None:
        self.recording.first_rows = self._first_rows.digest()
        if self._path is None:
            return
        if cluster.is_chief():
            self.recording.save(self._path)
        raise SystemExit(0)

    def _variables(self) -> list[tuple[str, AnyVariable]]:
        """Return the variables of the model that all ranks hold, with distinct names; without metrics and seeds."""
        model = self.model
        metrics = {id(v) for metric in model.metrics for v in metric.variables}
        untracked = [each for layer in model._flatten_layers() for each in untracked_variables(layer)]
        tracked = {id(getattr(v, "_value", v)) for v in model.variables}
        named = [(v.path, v) for v in [*model.trainable_variables, *model.non_trainable_variables]]
        named += [(each.name, each.variable) for each in untracked if id(each.variable) not in tracked]
        found: dict[str, AnyVariable] = {}
        for path, variable in named:
            dtype = tf.as_dtype(variable.dtype)
            if id(variable) in metrics or is_seed_state(variable) or not (dtype.is_floating or dtype.is_integer):
                continue
            if holding_of(variable) is not None:
                if path not in self.recording.not_compared:
                    self.recording.not_compared.append(path)
                continue
            name = path
            number = 1
            while name in found:
                number += 1
                name = f"{path} ({number})"
            found[name] = variable
        return list(found.items())


def _optimizers(model: keras.Model) -> Iterable[keras.Optimizer]:
    """Return the optimizers of a model that update variables: those inside others."""
    found: dict[int, keras.Optimizer] = {}
    for optimizer in all_optimizers(model):
        for each in updaters_of(optimizer):
            found[id(each)] = each
    return found.values()


def _random_operations(model: keras.Model, silenced: list[str]) -> list[str]:
    """Return the names of the random operations of the graph that is being traced; in eager mode, of layers."""
    if not tf.inside_function():
        layers = [layer for layer in model._flatten_layers() if getattr(layer, "_seed_generators", ())]
        return [layer.name for layer in layers if layer.name not in silenced]
    graph = tf.compat.v1.get_default_graph()
    named = [(op.type, op.name) for op in graph.get_operations()]
    named += [(node.op, node.name) for f in graph.as_graph_def().library.function for node in f.node_def]
    draws = [name for kind, name in named if "Random" in kind or kind == "Multinomial"]
    return [name for name in draws if TRUE_AT_RUN_TIME not in name]
