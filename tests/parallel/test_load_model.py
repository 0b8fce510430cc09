"""hk.load_model: an optimizer that combines gradients, with its state, whichever kind of optimizer was saved."""

from __future__ import annotations

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers.as_one import same_values
from helpers.saved_models import X, Y, fit, model_of
from helpers.tiers import at_night

import hvdkit as hk
from hvdkit.optimizer.mixin import DistributedMixin
from hvdkit.sharding.shards import piece_states

opts = keras.optimizers


def values(model):
    return [np.asarray(v) for v in [*model.weights, *model.optimizer.variables]]


def saved_and_loaded(model, path):
    """Save the chief's model, and return it as every rank loads it."""
    if hk.is_chief():
        model.save(path)
    hk.barrier()
    loaded = hk.load_model(path)
    assert isinstance(loaded.optimizer, DistributedMixin)
    return loaded


def share(rank, size):
    """Return this rank's rows of each batch of 8 over all ranks; rows left over by the division are dropped."""
    rows = np.arange(24).reshape(3, 8)
    return np.concatenate([batch[rank * (8 // size) : (rank + 1) * (8 // size)] for batch in rows])


@pytest.mark.parametrize(
    "saved_by", at_night(["plain", "distributed", "accumulating", "scaled"], but=["distributed", "scaled"])
)
def test_training_goes_on_as_if_never_saved(saved_by, rank, size, shared_path):
    """One rank saves after an epoch; each rank then trains on the batches of the uninterrupted process."""
    make = {
        "scaled": lambda: opts.LossScaleOptimizer(opts.Adam(0.01), initial_scale=8.0),
        "accumulating": lambda: opts.Adam(0.01, gradient_accumulation_steps=2),
    }.get(saved_by, lambda: opts.Adam(0.01))
    model = fit(model_of(hk.DistributedOptimizer(make()) if saved_by == "distributed" else make()))
    loaded = saved_and_loaded(model, shared_path / "model.keras")
    same_values(values(loaded), values(model))
    fit(model)
    fit(loaded)
    same_values(values(loaded), values(model), rtol=1e-5, atol=1e-6)


@pytest.mark.core
def test_gradients_are_combined_and_ranks_begin_equal(rank, size, tmp_path):
    model = fit(model_of(opts.Adam(0.01)))
    model.layers[0].kernel.assign_add(np.full((4, 3), float(rank), "f4"))
    model.save(tmp_path / "model.keras")  # a different file on each rank
    loaded = hk.load_model(tmp_path / "model.keras", clip_global_norm=1.0)
    hk.compare_variables([*loaded.variables, *loaded.optimizer.variables])
    assert loaded.optimizer._hvdkit.clip_global_norm == 1.0
    mine = share(rank, size)
    loaded.fit(X[mine], Y[mine], batch_size=8 // size, verbose=0)
    hk.compare_variables([*loaded.trainable_variables, *loaded.optimizer.variables])


def test_a_model_that_was_never_trained_can_be_loaded(shared_path):
    model = model_of(opts.LossScaleOptimizer(opts.Adam(0.01)))
    loaded = saved_and_loaded(model, shared_path / "model.keras")
    fit(model)
    fit(loaded)
    same_values(values(loaded), values(model), rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("jit_compile", [True, False, "auto"])
def test_jit_compile_is_kept(jit_compile, shared_path):
    results = []
    for how in (False, jit_compile):
        model = model_of(None)
        model.compile(opts.Adam(0.01), keras.losses.MeanSquaredError(), jit_compile=how)
        loaded = saved_and_loaded(model, shared_path / f"{how}.keras")
        assert loaded.jit_compile is (how is True)
        hk.fit(loaded, X, Y, batch_size=8, shuffle=False, verbose=0)
        if how is True:
            loaded.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[hk.callbacks.MetricAverage()])
        else:
            fit(loaded)
        results.append(values(loaded))
    same_values(*results, rtol=1e-4, atol=1e-5)


def test_a_file_that_a_rank_cannot_read_is_an_error_on_every_rank(rank, size, tmp_path):
    model = fit(model_of(opts.Adam(0.01)))
    if rank < size - 1:
        model.save(tmp_path / "model.keras")
    with pytest.raises((ValueError, hk.CollectiveMismatchError), match=r"model\.keras"):
        hk.load_model(tmp_path / "model.keras")


WRITER = """
import sys, numpy as np, keras, hvdkit as hk
hk.init()
keras.utils.set_random_seed(5)
model = keras.Sequential([keras.Input((2,), dtype="int64"), hk.layers.ShardedEmbedding(11, 4),
                          keras.layers.Flatten(), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.01)
if sys.argv[2] == "scaled":
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
model.compile(hk.DistributedOptimizer(optimizer, sparse_updates="exact"), "mse", jit_compile=False)
ids = np.arange(24).reshape(12, 2) % 11
model.fit(ids, ids[:, :1] / 11.0, batch_size=4, shuffle=False, verbose=0)
model.save(sys.argv[1] + "/model.keras")
np.savez(sys.argv[1] + "/slots.npz", *[np.asarray(v) for v in model.optimizer.variables])
"""


@pytest.mark.parametrize("optimizer", ["plain", "scaled"])
def test_sharded_tables_come_with_their_slots(optimizer, shared_path):
    if hk.is_chief():
        alone = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_"))}
        subprocess.run([sys.executable, "-c", WRITER, str(shared_path), optimizer], env=alone, check=True)
    hk.barrier()
    loaded = hk.load_model(shared_path / "model.keras", sparse_updates="exact")
    slots = list(np.load(shared_path / "slots.npz").values())
    for variable, whole in zip(loaded.optimizer.variables, slots, strict=True):
        for part in piece_states(variable):
            at = tuple(slice(i.start, i.stop, i.step) for i in part.local_index)
            np.testing.assert_array_equal(np.asarray(part.local), whole[at])
        if not piece_states(variable):
            np.testing.assert_array_equal(np.asarray(variable), whole)
