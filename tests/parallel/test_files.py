"""Files as sources on real ranks: each scans a part, all see the same files, hk.fit equals one process."""

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.as_one import same_weights

import hvdkit as hk

pytestmark = pytest.mark.contract

hk.init()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(230, 3)).astype(np.float32)
Y = (X @ [[1.0], [-2.0], [0.5]]).astype(np.float32)[:, 0]
OPTIONS = {"shuffle_seed": 1, "shuffle": "blocks", "shuffle_buffer": 64, "interleave": 4}


def write(folder, files=7):
    """Let the chief write files of unequal numbers of rows."""
    if hk.is_chief():
        for number, part in enumerate(np.array_split(np.arange(len(X)), files)):
            columns = {"x": pa.FixedSizeListArray.from_arrays(X[part].ravel(), 3), "y": Y[part], "id": part}
            pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=9)
        (folder / "ids.csv").write_text("".join(f"{i},{Y[i]}\n" for i in range(len(Y))))
    hk.barrier()


def rows_of(batch):
    return batch["x"], batch["y"]


@pytest.mark.parametrize("options", [{}, {"shuffle_seed": 1}, OPTIONS])
def test_ranks_read_the_global_batches_together(shared_path, options):
    write(shared_path)
    for source in (hk.data.parquet(shared_path), hk.data.delimited(shared_path / "ids.csv", {"id": "i8", "y": "f4"})):
        batches = hk.data.GlobalBatches(source, 16, epochs=2, **options)
        for whole in hk.data.GlobalBatches(source, 16, epochs=2, rank=0, size=1, **options):
            batch = next(batches)
            np.testing.assert_array_equal(hk.allgather(batch["id"]), whole["id"])
            np.testing.assert_allclose(batch["y"], Y[batch["id"]], rtol=1e-5)
        assert next(batches, None) is None


@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_fit_equals_one_process(shared_path, options):
    write(shared_path)
    source = hk.data.parquet(shared_path, ["x", "y"]).map(rows_of)

    def trained(fit, batches):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        fit(model, batches)
        return model

    whole = hk.data.GlobalBatches(source, 24, rank=0, size=1, remainder="drop", **options)
    alone = trained(lambda model, batches: model.fit(batches.as_keras(), epochs=2, verbose=0, shuffle=False), whole)
    mine = hk.data.GlobalBatches(source, 24, remainder="drop", **options)
    same_weights(trained(lambda model, batches: hk.fit(model, batches, epochs=2, verbose=0), mine), alone)


def test_ranks_that_see_other_files_are_named(tmp_path, rank, size):
    if size == 1:
        return
    np.save(tmp_path / "a.npy", np.zeros(8 if rank < size - 1 else 9))
    with pytest.raises(hk.CollectiveMismatchError, match=rf"paths: .*a\.npy.* on rank {size - 1 if size > 2 else 1}"):
        hk.data.npy(tmp_path)


def test_a_damaged_file_is_an_error_on_every_rank(shared_path, rank, size):
    write(shared_path)
    if hk.is_chief():
        (shared_path / "3.parquet").write_bytes(b"PAR1 and no more")
    hk.barrier()
    with pytest.raises(hk.DataError, match=r"3\.parquet is not a whole Parquet file"):
        hk.data.parquet(shared_path)
    with pytest.raises(ValueError if rank == 0 else hk.DataError, match="paths"):
        hk.data.parquet(shared_path / ("missing" if rank == 0 else "2.parquet"))
