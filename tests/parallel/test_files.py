"""Files as sources on real ranks: each scans a part, all see the same files, hk.fit equals one process."""

import copy
import gc
import os
import threading

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from helpers.as_one import same_weights
from helpers.data_files import FORMATS
from helpers.pairwise import printed
from helpers.speed import wait_until

import hvdkit as hk

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


@pytest.mark.core(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("options", [{"shuffle_seed": 1}, OPTIONS])
def test_ranks_read_the_global_batches_together(shared_path, options):
    write(shared_path)
    for source in (hk.data.parquet(shared_path), hk.data.delimited(shared_path / "ids.csv", {"id": "i8", "y": "f4"})):
        batches = hk.data.GlobalBatches(source, 16, epochs=2, **options)
        for whole in hk.data.GlobalBatches(source, 16, epochs=2, rank=0, size=1, **options):
            batch = next(batches)
            np.testing.assert_array_equal(hk.allgather(batch["id"]), whole["id"])
            np.testing.assert_allclose(batch["y"], Y[batch["id"]], rtol=1e-5)
        assert next(batches, None) is None


def trained(fit, batches):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    fit(model, batches)
    return model


@pytest.mark.parametrize(("kind", "options"), [("files", {}), ("mixture", OPTIONS)])
def test_fit_equals_one_process(shared_path, kind, options):
    write(shared_path)
    source = hk.data.parquet(shared_path, ["x", "y"]).map(rows_of)
    if kind == "mixture":
        few = hk.data.parquet([shared_path / f"{i}.parquet" for i in range(2)], ["x", "y"]).map(rows_of)
        source = hk.data.mixture([source, few], [2, 1])

    whole = hk.data.GlobalBatches(source, 24, rank=0, size=1, remainder="drop", **options)
    alone = trained(lambda model, batches: model.fit(batches.as_keras(), epochs=2, verbose=0, shuffle=False), whole)
    mine = hk.data.GlobalBatches(source, 24, remainder="drop", **options)
    same_weights(trained(lambda model, batches: hk.fit(model, batches, epochs=2, verbose=0), mine), alone)


class StopAtOnce(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


def test_threads_end_after_a_fit_that_stops_within_an_epoch(shared_path):
    write(shared_path)
    source = hk.data.parquet(shared_path, ["x", "y"]).map(rows_of)
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    before = set(threading.enumerate())
    hk.fit(model, hk.data.GlobalBatches(source, 8, **OPTIONS), epochs=3, verbose=0, callbacks=[StopAtOnce()])

    def have_ended():
        gc.collect()  # TensorFlow's threads may keep the iterator for a moment
        started = set(threading.enumerate()) - before
        return not any(each.name.startswith("hvdkit-read") for each in started)

    wait_until(have_ended)


def test_ranks_that_see_other_files_are_named(tmp_path, rank, size):
    np.save(tmp_path / "a.npy", np.zeros(8 if rank < size - 1 else 9))
    with pytest.raises(hk.CollectiveMismatchError, match=rf"paths: .*a\.npy.* on rank {size - 1}"):
        hk.data.npy(tmp_path)


@pytest.mark.core
def test_a_damaged_file_is_an_error_on_every_rank(shared_path, rank, size):
    write(shared_path)
    if hk.is_chief():
        (shared_path / "3.parquet").write_bytes(b"PAR1 and no more")
    hk.barrier()
    with pytest.raises(hk.DataError, match=r"3\.parquet is not a whole Parquet file"):
        hk.data.parquet(shared_path)
    with pytest.raises(ValueError if rank == 0 else hk.DataError, match="paths"):
        hk.data.parquet(shared_path / ("missing" if rank == 0 else "2.parquet"))


def test_bad_input_is_an_error_on_every_rank(shared_path):
    """One rank finds what is wrong in a file, every rank what is wrong in a listing."""
    for name in ("table", "fifo", "npy", "zlib", "cut", "int96"):
        if hk.is_chief():
            (shared_path / name).mkdir()
    hk.barrier()
    if hk.is_chief():
        write_table = lambda path: pq.write_table(pa.table({"x": np.arange(4)}), path)  # noqa: E731
        for name in ("table", "fifo"):
            write_table(shared_path / name / "a.parquet")
        (shared_path / "table" / "_delta_log").mkdir()
        (shared_path / "table" / "_delta_log" / "0.json").write_text("{}")
        os.mkfifo(shared_path / "fifo" / "b.parquet")
        np.save(shared_path / "npy" / "a.npy", np.zeros(4))
        header = (shared_path / "npy" / "a.npy").read_bytes().replace(b"(4,), }", b"(9,), }")
        (shared_path / "npy" / "b.npy").write_bytes(header)
        with tf.io.TFRecordWriter(str(shared_path / "zlib" / "a"), "ZLIB") as file:
            file.write(b"record")
        (shared_path / "cut" / "a.csv").write_text("1,2\n3,4")
        times = pa.array([1, 1001], pa.timestamp("ns"))
        pq.write_table(
            pa.table({"t": times}), shared_path / "int96" / "a.parquet", use_deprecated_int96_timestamps=True
        )
    hk.barrier()
    ends = {"expect_final_newline": True}
    for name, read, text in (
        ("table", hk.data.parquet, "table, a table of Delta Lake"),
        ("fifo", hk.data.parquet, r"b\.parquet, a FIFO"),
        ("npy", hk.data.npy, r"b\.npy is not a whole"),
        ("zlib", hk.data.tfrecord, "a is compressed with zlib"),
        (
            "cut",
            lambda path: hk.data.delimited(path, {"x": "i8", "y": "i8"}, **ends),
            r"a\.csv ends without a line end",
        ),
        ("int96", hk.data.parquet, r"column 't' of .*a\.parquet.* row 0 .* has nanoseconds"),
    ):
        with pytest.raises((hk.DataError, ValueError), match=text):
            read(shared_path / name)


def test_new_files_are_found_by_all_ranks_together(shared_path, rank, size):
    write(shared_path, files=3)
    later = [(shared_path / f"{i}.parquet", shared_path / f"_{i}.parquet") for i in (1, 2)]
    if hk.is_chief():
        for shown, hidden in later:
            shown.rename(hidden)
    hk.barrier()
    source = hk.data.parquet(shared_path, ["x", "y"]).map(rows_of)
    options = {"shuffle_seed": 1, "remainder": "drop", "growth": "replace"}
    mine = hk.data.GlobalBatches(source, 24, **options)
    whole = hk.data.GlobalBatches(source, 24, rank=0, size=1, **options)

    def fit(model, batches):
        for day in range(3):
            if day:
                if hk.is_chief():
                    later[day - 1][1].rename(later[day - 1][0])
                hk.barrier()
                assert batches.add_new_files(epoch=day) == [f"{day}.parquet"]
            if batches is mine:
                hk.fit(model, batches, epochs=day + 1, initial_epoch=day, verbose=0)
            else:
                model.fit(batches.as_keras(), verbose=0, shuffle=False)
        hk.barrier()  # every rank has read the files
        if hk.is_chief():
            for shown, hidden in later:
                shown.rename(hidden)
        hk.barrier()

    model = trained(fit, mine)
    same_weights(model, trained(fit, whole))
    with pytest.raises(ValueError, match=r"epochs: got 5, with GlobalBatches\(growth='replace'\), expected at most 3"):
        hk.fit(model, mine, epochs=5, initial_epoch=2, verbose=0)
    with pytest.raises(ValueError, match=r"GlobalBatches\(growth=\), with logdir="):
        hk.fit(model, mine, epochs=3, initial_epoch=2, logdir=shared_path / "log")
    with pytest.raises(hk.CollectiveMismatchError, match=r"epoch and step of new files: .* on rank"):
        mine.add_new_files(epoch=4 + (rank == size - 1))
    unread = hk.data.GlobalBatches(source, 24, **options)
    if rank == size - 1:  # only there, new files would replace those of this epoch in the next one
        next(copy.copy(unread))
    with pytest.raises(hk.CollectiveMismatchError, match=r"epoch and step of new files: .*True.* on rank"):
        unread.add_new_files()


def test_a_supervisor_restores_the_files_of_a_growing_run(shared_path):
    write(shared_path, files=2)
    shown, hidden = shared_path / "1.parquet", shared_path / "_1.parquet"
    if hk.is_chief():
        shown.rename(hidden)
    hk.barrier()

    def train(until, days=()):
        """Train to step ``until`` or to the end of the files; return the examples and the state of the data."""
        source = hk.data.parquet(shared_path / "*.parquet", ["id"])
        data = hk.data.GlobalBatches(source, 16, shuffle_seed=1, growth="replace", remainder="drop")
        seen = []
        with hk.Supervisor(shared_path / "run", data=data, variables=tf.Variable(1.0), summary_steps=None) as session:
            for day in ((), *days):
                assert data.add_new_files() == [*day] if day else True
                for batch in session.batches(until):
                    seen += hk.allgather(batch["id"]).tolist()
                    session.step()
        return seen, data.state

    first, _ = train(3)
    if hk.is_chief():
        hidden.rename(shown)
    hk.barrier()
    rest, state = train(7)  # finds both files, and restores the first
    assert state["file_names"] == ["0.parquet"] and (state["epoch"], state["global_step"]) == (1, 7)
    assert len({*first, *rest}) == len(first + rest) == 7 * 16 and max(first + rest) < 115
    later, state = train(None, [["1.parquet"]])
    assert state["file_names"] == ["1.parquet"] and state["global_step"] == 14
    assert len({*later}) == len(later) == 7 * 16 and min(later) >= 115


# ---- arguments that differ between ranks -----------------------------------------------------------------------------


def first(record):
    return record


def second(record):
    return {"x": record}


def write_lines(folder):
    if hk.is_chief():
        (folder / "a").mkdir()
        (folder / "a" / "ids.csv").write_text("1,2\n3,4\n" * 20)
        with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as file:
            file.write(b"record")
    hk.barrier()
    return folder / "a"


LINES = {"a": "int64", "b": "int64"}
DIFFERENCES = {
    "columns": lambda folder, odd: hk.data.delimited(folder, {"a": "int32", "b": "int64"} if odd else LINES),
    "delimiter": lambda folder, odd: hk.data.delimited(folder, LINES, delimiter=";" if odd else ","),
    "header_lines": lambda folder, odd: hk.data.delimited(folder, LINES, header_lines=int(odd)),
    "fill": lambda folder, odd: hk.data.delimited(folder, LINES, fill={"a": int(odd)}),
    "on_error": lambda folder, odd: hk.data.delimited(folder, LINES, on_error="skip" if odd else "raise"),
    "parse": lambda folder, odd: hk.data.tfrecord(f"{folder}.tfrecord", second if odd else first),
    "function": lambda folder, odd: hk.data.criteo(folder) if odd else hk.data.delimited(folder, LINES),
}


def test_ranks_with_other_arguments_are_named(shared_path, rank):
    folder = write_lines(shared_path)
    for name, read in printed(DIFFERENCES.items()):
        with pytest.raises(hk.CollectiveMismatchError, match=rf"^{name}: got .* on rank 1, expected"):
            read(folder, rank == 1)


def test_functions_of_one_name_with_unlike_results_are_named(shared_path, rank, size):
    folder = write_lines(shared_path)
    dtype = tf.int32 if rank == size - 1 else tf.int64
    with pytest.raises(hk.CollectiveMismatchError, match=rf"first row .*int32.* on rank {size - 1}"):
        hk.data.tfrecord(f"{folder}.tfrecord", lambda record: tf.cast(tf.strings.length(record), dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle_seed": 2},
        {"shuffle_seed": 1, "shuffle": "blocks"},
        {"shuffle_seed": 1, "shuffle": "blocks", "interleave": 3},
        {"shuffle_seed": 1, "shuffle": "blocks", "shuffle_buffer": 7},
        {"global_batch_size": 12},
        {"remainder": "pad"},
    ],
)
def test_fit_and_supervisor_name_ranks_with_another_order(shared_path, rank, size, options):
    source = hk.data.delimited(write_lines(shared_path), LINES).map(lambda batch: (batch["a"] * 1.0, batch["b"] * 1.0))
    usual = {"global_batch_size": 6, "remainder": "drop", "shuffle_seed": 1}
    if len(options) == 3:
        usual["shuffle"] = "blocks"
    mine = {**usual, **options} if rank == size - 1 else usual
    model = keras.Sequential([keras.layers.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(hk.CollectiveMismatchError, match=f"on rank {size - 1}"):
        hk.fit(model, hk.data.GlobalBatches(source, **mine), verbose=0)
    with (
        pytest.raises(hk.CollectiveMismatchError, match=f"on rank {size - 1}"),
        hk.Supervisor(shared_path / "log", model=model, data=hk.data.GlobalBatches(source, **mine)),
    ):
        pass


def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(tmp_path, rank, size):
    np.save(tmp_path / "a.npy", np.zeros(8))
    if rank == size - 1:
        (tmp_path / "a.npy").write_bytes(bytes((tmp_path / "a.npy").stat().st_size))
    with pytest.raises(hk.DataError, match=r"a\.npy is not a whole"):
        hk.data.npy(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_every_rank_names_a_file_that_was_cut(shared_path, name):
    write_part, read, _ = FORMATS[name]
    if hk.is_chief():
        for number in range(3):
            write_part(shared_path / f"part_{number}", range(100 * number, 100 * number + 100))
        path = sorted(each for each in shared_path.iterdir() if each.name.startswith("part_1"))[0]
        os.truncate(path, path.stat().st_size - 12)
    hk.barrier()
    with pytest.raises(hk.DataError, match="part_1"):
        # Lines are checked when they are read: those of this rank are the whole batch.
        for _ in hk.data.GlobalBatches(read(shared_path), 30, epochs=1, rank=0, size=1):
            pass


def test_ranks_of_a_host_write_one_cache(shared_path):
    folder = write_lines(shared_path)
    for _ in range(3):
        assert hk.data.delimited(folder, LINES).examples == 40
    hk.barrier()
    assert len([*folder.iterdir()]) == 2
