"""Files of every format with known examples: those with ids ``range(start, stop)``."""

import gc
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter

import hvdkit as hk
from helpers.speed import WAIT
from hvdkit.data.block_order import BlockOrder, Lanes

MODES = {
    "in order": {},
    "full": {"shuffle_seed": 3},
    "blocks": {"shuffle_seed": 3, "shuffle": "blocks", "shuffle_buffer": 200, "interleave": 4},
    "lanes": {"shuffle": "blocks", "interleave": 4},
}
FEATURES = {
    "id": tf.io.FixedLenFeature([], tf.int64),
    "x": tf.io.FixedLenFeature([2], tf.float32),
    "list": tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64),
}


def list_of(i):
    return [i + k for k in range(i % 4)]


def example(i):
    ints = lambda values: tf.train.Feature(int64_list=tf.train.Int64List(value=values))  # noqa: E731
    floats = tf.train.Feature(float_list=tf.train.FloatList(value=[i / 2, i / 4]))
    features = {"id": ints([i]), "x": floats, "list": ints(list_of(i))}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_parquet(path, ids):
    columns = {
        "id": ids,
        "x": pa.FixedSizeListArray.from_arrays(np.array([[i / 2, i / 4] for i in ids], np.float32).ravel(), 2),
        "list": [list_of(i) for i in ids],
        "text": [f"r{i}" for i in ids],
    }
    pq.write_table(pa.table(columns), f"{path}.parquet", row_group_size=50)


def write_tfrecord(path, ids):
    with tf.io.TFRecordWriter(str(path)) as file:
        for i in ids:
            file.write(example(i))


def write_array_record(path, ids):
    file = ArrayRecordWriter(str(path), "group_size:1")
    for i in ids:
        file.write(example(i))
    file.close()


def write_delimited(path, ids):
    lines = [f"{i},{i / 2},r{i}" for i in ids]
    path.with_suffix(".csv").write_text("\n".join(["id,x,text", *lines]) + "\n" * (len(ids) % 2))


def write_criteo(path, ids):
    def line(i):
        counts = [str(i + k) if (i + k) % 5 else "" for k in range(13)]
        return "\t".join([str(i % 2), *counts, f"{i:08x}", *(f"{i + k:08x}" if i % 3 else "" for k in range(25))])

    path.write_text("".join(f"{line(i)}\n" for i in ids))


def write_npy(path, ids):
    np.save(path, np.array(ids)[:, None] + np.array([0, 0.5]))


def check_examples(batch):
    ids = batch["id"]
    np.testing.assert_allclose(batch["x"], np.stack([ids / 2, ids / 4], axis=1))
    assert batch["list"].to_list() == [list_of(i) for i in ids.tolist()]
    return ids


def check_parquet(batch):
    assert batch["text"].tolist() == [b"r%d" % i for i in batch["id"]]
    return check_examples(batch)


def check_delimited(batch):
    assert batch["text"].tolist() == [b"r%d" % i for i in batch["id"]]
    np.testing.assert_array_equal(batch["x"], np.float32(batch["id"] / 2))
    return batch["id"]


def check_criteo(batch):
    inputs, labels = batch
    ids = inputs["categories"][:, 0]
    np.testing.assert_array_equal(labels, ids % 2)
    counts = ids[:, None] + np.arange(13)
    np.testing.assert_array_equal(inputs["counts"], np.where(counts % 5, counts, 0))
    others = ids[:, None] + np.arange(25)
    np.testing.assert_array_equal(inputs["categories"][:, 1:], np.where(ids[:, None] % 3, others, -1))
    return ids


def check_npy(batch):
    np.testing.assert_array_equal(batch[:, 1], batch[:, 0] + 0.5)
    return batch[:, 0].astype(np.int64)


COLUMNS = {"id": "int64", "x": "float32", "text": "S"}
FORMATS = {
    "parquet": (write_parquet, hk.data.parquet, check_parquet),
    "tfrecord": (write_tfrecord, lambda paths: hk.data.tfrecord(paths, FEATURES), check_examples),
    "array_record": (write_array_record, lambda paths: hk.data.array_record(paths, FEATURES), check_examples),
    "delimited": (write_delimited, lambda paths: hk.data.delimited(paths, COLUMNS, header_lines=1), check_delimited),
    "criteo": (write_criteo, hk.data.criteo, check_criteo),
    "npy": (write_npy, hk.data.npy, check_npy),
}


def damage(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def block_order(starts, batch_size, lanes, window, seed, epoch=0):
    """Return a function that maps the positions of an epoch to examples."""
    n = int(starts[-1])
    dealt = Lanes(n, batch_size, lanes)
    order = BlockOrder(np.asarray(starts), dealt.starts + epoch * n, window, seed)

    def of(positions):
        lane, places = dealt(positions)
        return order(lane, places + epoch * n)

    return of


def reading_threads():
    gc.collect()
    return [thread for thread in threading.enumerate() if thread.name.startswith("hvdkit-read")]


def wait_for_end(threads):
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)
