"""Restore on M ranks what N ranks saved: real jobs, each element compared with a formula of its global position.

A job restores what the jobs before it saved, through the files and through the chief, and saves its own state.
"""

from __future__ import annotations

import json
import sys
from itertools import product

import numpy as np
import pytest
from helpers.jobs import MPI, run

import hvdkit as hk
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.reading import Reader

CODE = """
import json, pathlib, sys
import hvdkit as hk
import keras, numpy as np, tensorflow as tf
from hvdkit.sharding.shards import assign_whole, flat_shard_of
from hvdkit.sharding.partition import rows_of

folder, sources = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
hk.init()
rank, size = hk.rank(), hk.size()
SHAPES = {"mod": (23, 3), "div": (23, 3), "few": (2, 2), "none": (0, 2), "columns": (3, 7), "wide": (40_000, 16)}
SHAPES |= {"wide_mod": (40_000, 16)}

class Cut:
    def __init__(self, name, dtype, good):
        self.shape, self.dtype, self.partition = SHAPES[name], dtype, "mod" if "mod" in name else "div"
        axis = 1 if name == "columns" else 0
        index = [range(n) for n in self.shape]
        index[axis] = rows_of(self.partition, self.shape[axis], rank, size)
        self.local_index = tuple(index)
        self.local = tf.Variable(tf.zeros([len(i) for i in index], dtype))
        if good:
            self.assign_local(self.expected())

    def expected(self):
        rows, columns = np.ix_(*self.local_index)
        return (rows * 100.0 + columns).astype(tf.as_dtype(self.dtype).as_numpy_dtype)

    def assign_local(self, values):
        self.local.assign(values)

# On two ranks each has all slots; elsewhere they are divided, and come back from any to any.
SLOTS = {"cube": ((5, 3, 2), "float32"), "scalar": ((), "float32"), "half": ((7,), "bfloat16")}
SLOTS |= {"wide": ((40_000, 16), "float32"), "empty": ((0, 3), "float32"), "double": ((4, 1), "float64")}

def whole(slot):
    shape = slot.shape if flat_shard_of(slot) is None else flat_shard_of(slot).shape
    return (np.arange(np.prod(shape)) * 1.0 + len(slot.name)).reshape(shape)

def divided(good):
    optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(name="slots"), shard_states=size != 2)
    variables = [keras.Variable(np.zeros(shape), dtype=d, name=n) for n, (shape, d) in SLOTS.items()]
    optimizer.build(variables)
    for slot in optimizer.variables[2:] if good else ():
        assign_whole(slot, tf.cast(whole(slot), slot.dtype))
    return optimizer

def check_divided(optimizer):
    for slot in optimizer.variables[2:]:
        run = flat_shard_of(slot)
        assert (run is None) == (size in (1, 2)), slot
        expected = tf.cast(whole(slot), slot.dtype).numpy()
        if run is not None:
            expected = expected.reshape(-1)[run.elements.start : run.elements.stop].reshape(slot.shape)
        assert np.array_equal(slot.numpy(), expected), slot

def state(good):
    tables = {f"{n}/{d}": Cut(n, d, good) for n in SHAPES for d in ("float32", "bfloat16")}
    common = tf.Variable(np.arange(9, dtype=np.float64) / 7 if good else np.zeros(9))
    keras.utils.clear_session()
    norm = keras.layers.BatchNormalization(name="norm")
    norm.build((None, 2))
    norm.moving_mean.assign([rank, 10.0] if good else [-1.0, -1.0])
    adam = hk.DistributedOptimizer(keras.optimizers.SGD(), accumulate_steps=3, op=hk.Sum)
    adam.build([common])
    adam._accumulated_gradients[0].assign(np.full(9, 1.0 + rank if good else -1.0))
    seed = tf.random.Generator.from_state([rank if good else 50 + rank, 7, 9], "philox")
    state = {"tables": tables, "common": common, "norm": norm, "sum": adam, "seed": seed}
    return state | {"slots": divided(good)}

def check(into, saved):
    check_divided(into["slots"])
    for name, table in into["tables"].items():
        assert np.array_equal(np.asarray(table.local), table.expected()), (name, saved)
    assert np.array_equal(into["common"], np.arange(9, dtype=np.float64) / 7)
    mean = rank if size == saved else (saved - 1) / 2
    assert into["norm"].moving_mean.numpy().tolist() == [mean, 10.0], into["norm"].moving_mean
    total = saved * (saved + 1) / 2
    added = into["sum"]._accumulated_gradients[0]
    share = np.full(9, 1.0 + rank if size == saved else total / size).astype(added.dtype)
    assert np.array_equal(added, share), added
    assert into["seed"].state.numpy()[0] == (rank if rank < saved else 50 + rank)

done = []
if not (folder / f"saved-{size}").exists():
    hk.barrier()
    hk.checkpoint.save(folder / f"saved-{size}", state(good=True), gather=size == 3)
for saved in sources:
    for gather in (False, True):
        into = state(good=False)
        hk.checkpoint.restore(folder / f"saved-{saved}", into, gather=gather)
        check(into, saved)
        done.append([saved, gather])
hk.barrier()
if rank == 0:
    (folder / f"done-{size}.json").write_text(json.dumps(done))
"""
# More and fewer ranks, by an integer factor and not, and the same number again. A job saves before it restores.
LAUNCHES = [(1, []), (2, [1, 2]), (4, [1, 2, 4]), (3, [1, 2, 3, 4]), (1, [4, 3, 2, 1])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with the saves of all jobs."""
    folder = tmp_path_factory.mktemp("sizes")
    for size, sources in LAUNCHES:
        code = f"import sys; sys.argv[1:] = [{str(folder)!r}, {json.dumps(sources)!r}]\n{CODE}"
        if size == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", [""])
                exec(code, {"__name__": "job"})  # this process is the only rank
        else:
            job = run(code, MPI, size)
            assert job.code == 0, f"{sources} on {size} ranks: {job.output[-5000:]}"
        assert json.loads((folder / f"done-{size}.json").read_text()) == [
            [s, g] for s in sources for g in (False, True)
        ]
    return folder


def test_every_number_of_ranks_saved_what_any_other_restores(folder):
    for size in (1, 2, 3, 4):
        assert hk.checkpoint.inspect(folder / f"saved-{size}").ranks == size
        hk.checkpoint.verify(folder / f"saved-{size}")


def test_the_files_tell_the_same_global_arrays(folder, tmp_path):
    for size in (1, 2, 3, 4):
        hk.checkpoint.export_npy(folder / f"saved-{size}", tmp_path / str(size), ["tables/*", "common", "slots/*"])
    first = sorted((tmp_path / "1").rglob("*.npy"))
    assert len(first) == 29
    for file in first:
        for size in (2, 3, 4):
            other = tmp_path / str(size) / file.relative_to(tmp_path / "1")
            np.testing.assert_array_equal(np.load(other), np.load(file))
    rows, columns = np.ix_(range(23), range(3))
    np.testing.assert_array_equal(np.load(tmp_path / "3" / "tables" / "mod" / "float32.npy"), rows * 100 + columns)


SLOT = "slots/slots/cube_momentum"


def test_boxes_and_runs_of_elements_are_read_from_each_other(folder):
    names = (SLOT, "tables/mod/float32", "tables/columns/float32", "slots/slots/scalar_momentum")
    for name, size in product(names, (1, 2, 3, 4)):
        path = folder / f"saved-{size}"
        with Reader(path, manifest := Manifest.load(path)) as reader:
            whole = reader.whole(name)
            elements = whole.size
            for run in {range(0), range(elements), range(elements // 3, elements - 2), range(elements - 1, elements)}:
                read = reader.sharded(name, (run,), flat=True)
                np.testing.assert_array_equal(read, whole.reshape(-1)[run.start : run.stop], f"{name} {size} {run}")
            if whole.ndim:
                index = (range(1, whole.shape[0], 2), *(range(n - 1) for n in whole.shape[1:]))
                np.testing.assert_array_equal(reader.sharded(name, index), whole[np.ix_(*index)], f"{name} {size}")
    assert manifest.variables[SLOT].partition == "flat" and len(manifest.variables[SLOT].parts) in (1, 2)
