"""The variables of a model when ``hk.fit`` begins: built before the step is traced, and equal to the chief's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from hvdkit.collectives.digests import tf_variable
from hvdkit.keras.model_optimizers import optimizers_of
from hvdkit.keras.rank_seeds import global_generator, spread_seeds
from hvdkit.keras.rank_state import state_of
from hvdkit.keras.shares import Shares
from hvdkit.keras.step_scopes import has_own_step
from hvdkit.keras.unchanged_models import is_complete
from hvdkit.optimizer.inner_optimizers import gradient_sums_of
from hvdkit.optimizer.model_numbers import KnownNumbers, agree_on_numbers, known_numbers
from hvdkit.sharding.shards import AnyVariable, holding_of, is_seed_state
from hvdkit.sharding.variables import broadcast_and_gather


class VariableBroadcaster:
    """Gives the variables of a model and its optimizers the chief's values."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._known: dict[int, AnyVariable] = {}

    def broadcast_all(self, *, restored: Iterable[AnyVariable] = ()) -> None:
        """Broadcast the chief's values of all existing variables, except ``restored``; seed each rank differently."""
        own = {id(tf_variable(v)) for v in restored}
        variables = self._all()
        self._known = {id(v): v for v in variables}
        self._broadcast([v for v in variables if id(tf_variable(v)) not in own], global_generator().state)

    def broadcast_new(self) -> None:
        """Broadcast variables created since the last call."""
        self._broadcast(self.new())

    def new(self) -> list[AnyVariable]:
        """Return the variables created since the last broadcast."""
        return [v for v in self._all() if id(v) not in self._known]

    def _broadcast(self, variables: list[AnyVariable], *replicated_states: keras.Variable) -> None:
        self._known |= {id(v): v for v in variables}
        states = [v for v in variables if is_seed_state(v)]

        def of_this_rank() -> tuple[list[np.ndarray], KnownNumbers]:
            return [np.asarray(v) for v in (*states, *replicated_states)], known_numbers(variables)

        sums = [v for each in optimizers_of(self._model) for v in gradient_sums_of(each)]
        ranks = broadcast_and_gather(variables, of_this_rank, of_ranks=sums)
        spread_seeds(states, list(replicated_states), ranks[0][0])
        agree_on_numbers(variables, [numbers for _, numbers in ranks])

    def _all(self) -> list[AnyVariable]:
        optimizer_variables = [v for each in optimizers_of(self._model) for v in each.variables]
        untracked = [each.variable for each in state_of(self._model)]
        variables = [*self._model.variables, *untracked, *optimizer_variables]
        return [v for v in {id(v): v for v in variables}.values() if holding_of(v) is None]


def build_for(model: keras.Model, data: Shares) -> None:
    """Build a model for ``data``, by a symbolic call; one that cannot be called so stays as it is."""
    inputs = keras.utils.unpack_x_y_sample_weight(data.get_tf_dataset().element_spec[0])[0]
    if all(isinstance(each, tf.TensorSpec) for each in tree.flatten(inputs)):
        with contextlib.suppress(Exception):  # a Supervisor then refuses the model
            model(tree.map_structure(lambda each: keras.KerasTensor(each.shape, each.dtype.name), inputs))


def build_before_tracing(model: keras.Model, data: Shares) -> None:
    """Build the optimizer and the compiled metrics of a complete model with Keras's own step.

    TensorFlow traces a function twice if it creates variables.
    """
    if model.run_eagerly or has_own_step(model, "train") or not is_complete(model):
        return
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    compiled = [each for each in (model._compile_metrics, model._compile_loss) if each is not None and not each.built]
    outputs = getattr(getattr(model, "_functional", model), "_outputs_struct", None)
    if not compiled or outputs is None or type(model).compute_metrics is not keras.Model.compute_metrics:
        return
    labels = keras.utils.unpack_x_y_sample_weight(data.get_tf_dataset().element_spec[0])[1]
    if labels is not None and all(isinstance(each, tf.TensorSpec) for each in tree.flatten(labels)):
        labels = tree.map_structure(lambda each: keras.KerasTensor(each.shape, each.dtype.name), labels)
        for each in compiled:
            each.build(labels, outputs)
