"""Weights and slots that are NaN or infinite are never saved as a good checkpoint, whatever the loss."""

from __future__ import annotations

import logging
import re

import keras
import numpy as np
import pytest

import hvdkit as hk


class Run:
    """A dense layer with BatchNormalization, and an embedding whose rows and slots are sharded over the ranks."""

    def __init__(self) -> None:
        ids = keras.Input((2,), dtype="int64")
        vectors = hk.layers.ShardedEmbedding(8, 3, seed=1, name="items")(ids)
        x = keras.layers.BatchNormalization(name="norm")(keras.layers.Flatten()(vectors))
        self.model = keras.Model(ids, keras.layers.Dense(1, name="out")(x))
        self.optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(0.1))
        self.model.compile(self.optimizer, "mse", jit_compile=False)
        self.optimizer.build(self.model.trainable_variables)

    def supervised(self, logdir, **options) -> hk.Supervisor:
        options = {"save_model_secs": None, "summary_steps": None, "check_steps": None} | options
        return hk.Supervisor(logdir, model=self.model, optimizer=self.optimizer, **options)

    def variable(self, part: str):
        every = [*self.model.variables, *self.optimizer.variables]
        return next(v for v in every if part in (v.path if hasattr(v, "path") else v.name))

    def spoil(self, part: str, value: float) -> None:
        """Set an element of a variable to ``value`` on the last rank that holds part of it."""
        variable = self.variable(part)
        array = keras.ops.convert_to_numpy(variable).copy()
        array.reshape(-1)[-1] = value
        variable.assign(array)


# Part of the variable's name; the name in the error; the rank in the error (None: the chief).
SPOILED = {
    "a weight": ("out/kernel", "model/out/kernel", 0),
    "a slot": ("out_kernel_velocity", r"optimizer/adam\w*/out_kernel_velocity", 0),
    "a moving statistic": ("norm/moving_variance", "model/norm/moving_variance", hk.size() - 1),
    "a shard of a table": ("items", "model/items", hk.size() - 1),
}


def names(folder) -> list[str]:
    hk.barrier()
    found = sorted(path.name for path in folder.iterdir())
    hk.barrier()
    return found


@pytest.mark.parametrize(
    ("what", "how"),
    [
        *((what, "save") for what in SPOILED),
        ("a weight", "timed"),
        ("a shard of a table", "at the end"),
        ("a shard of a table", "through the chief"),
    ],
)
def test_the_variable_the_rank_and_the_step_are_named(shared_path, rank, size, what, how):
    run, folder = Run(), shared_path / "run" / "checkpoints"
    part, name, where = SPOILED[what]
    options = {"gather": how == "through the chief", "save_steps": 4 if how == "timed" else None}
    words = rf"{name}\S*: got nan .*on rank {where} at step \d.* is not saved.* continue from step-000000002"
    sv = run.supervised(shared_path / "run", **options).__enter__()
    sv.step(loss=1.0)
    sv.step(loss=1.0)
    sv.save()
    if where == 0 or rank == where:
        run.spoil(part, np.nan)
    with pytest.raises(hk.NonFiniteError, match=words):
        if how == "timed":
            for _ in range(2000):
                sv.step(loss=1.0)
        else:
            sv.step(loss=1.0)
            if how == "at the end":
                sv.__exit__(None, None, None)
            else:
                sv.save()
    sv.close()
    assert names(folder) == ["step-000000002"]
    again = Run()
    with again.supervised(shared_path / "run", gather=how == "through the chief") as sv:
        assert sv.global_step == 2
        assert all(np.isfinite(keras.ops.convert_to_numpy(v)).all() for v in again.model.variables)


@pytest.mark.core
def test_a_job_that_goes_on_warns_and_keeps_the_checkpoint_before(shared_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("hvdkit"), "propagate", True)
    run = Run()
    with run.supervised(shared_path / "run", stop_on_nonfinite=False) as sv:
        sv.step(loss=1.0)
        sv.save()
        run.spoil("out/kernel", np.inf)
        sv.step(loss=float("inf"))
        sv.save(wait=False)
        sv.step(loss=float("inf"))
        with pytest.raises(hk.NonFiniteError, match="at step 3"):
            sv.save()
        sv.step(loss=float("inf"))
    assert names(shared_path / "run" / "checkpoints") == ["step-000000001"]
    if hk.is_chief():
        assert re.search(r"model/out/kernel: got inf .* at step 2.*training continues", caplog.text)
