"""The scripts for sharded models: the tutorial's matrix equals NumPy's, and a recommender learns."""

from __future__ import annotations

import inputs
import numpy as np
import partitioned
import pytest
import recommender

import hvdkit as hk

SMALL = {"examples": 24_000, "epochs": 3}


@pytest.mark.parametrize("partition", ["div", "mod"])
def test_four_parts_equal_numpys(partition, capfd):
    whole = partitioned.run(partitioned.Config(rows=40, partition=partition))
    printed = capfd.readouterr().out
    if not hk.is_chief():
        assert whole is None and printed == ""
        return
    assert "equal, bit for bit" in printed and "round 10\n" in printed
    expected = np.ones(4)
    for _ in range(100):
        expected = expected * np.arange(2, 6) + np.arange(1, 5)
    np.testing.assert_array_equal(whole[::10, 0], expected)


def test_values_that_overflow_are_named():
    with pytest.raises(hk.NonFiniteError, match=r"not finite on rank \d by round 60; float32 overflows at 3e\+38"):
        partitioned.run(partitioned.Config(rows=8, dtype="float32"))


@pytest.mark.nightly
def test_a_recommender_learns_what_was_planted(capfd):
    loss, area = recommender.run(recommender.Config(**SMALL))
    assert area > 0.7 and loss < 0.63
    if hk.is_chief():
        assert "best reachable" in capfd.readouterr().out
    assert len(set(hk.allgather_object((loss, area)))) == 1


@pytest.mark.core
def test_its_metrics_count_every_example_once():
    """The AUC over all ranks equals that of one process on the same examples."""
    data = inputs.planted_clicks(3001, features=3, rows=50)
    model = recommender.Recommender(data.rows, 2, seed=1)
    given, labels = data.part(True)
    model({name: part[:1] for name, part in given.items()})
    hk.broadcast_variables(model.variables)
    loss, area = recommender.evaluate(model, data)
    logits = np.asarray(model(given)).ravel()
    y = labels.ravel()
    assert area == pytest.approx(inputs.clicks.auc(y, logits), abs=2e-3)
    expected = np.mean(np.logaddexp(0, logits) - y * logits)
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("write", [inputs.write_parquet, inputs.write_criteo])
def test_a_recommender_learns_from_files(write, shared_path):
    """A run that stopped within an epoch and was continued equals one that was not."""
    folder = shared_path / "clicks"
    if hk.is_chief():
        write(inputs.planted_clicks(8_000, rows=50), folder, 4)
    hk.barrier()
    options = {"data_dir": str(folder), "rows": 50, "batch_size": 100, "epochs": 2}
    recommender.run(recommender.Config(**options, logdir=shared_path / "run", max_steps=70))
    found = recommender.run(recommender.Config(**options, logdir=shared_path / "run"))
    assert found == recommender.run(recommender.Config(**options)) and found[1] > 0.62
