"""How other libraries read the files of benchmarks/input.py. Each function returns the batches of an epoch.

tf.data as its performance guide says: files are interleaved if the order allows it, maps work on whole batches, and all
numbers of threads are AUTOTUNE. Other libraries get lists of rows instead of single rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from input_schema import BATCH, CATEGORIES, COLUMNS, COUNTS, DENSE, IDS, WINDOW


def tf_batches(name: str, order: str, files: list[str], rows: int) -> Iterable[Any]:
    """Return a ``tf.data.Dataset``; a full shuffle has a buffer of all rows."""
    import tensorflow as tf

    def lines_or_records(paths: Any) -> tf.data.Dataset:
        if name == "tfrecord":
            return tf.data.TFRecordDataset(paths, buffer_size=2**23)
        return tf.data.TextLineDataset(paths, buffer_size=2**23)

    if order == "blocks":
        paths = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files))
        each = paths.interleave(lines_or_records, len(files), num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
        each = each.shuffle(WINDOW)
    else:
        each = lines_or_records(files)
        each = each.shuffle(rows) if order == "full" else each
    parse = {"tfrecord": tf_examples, "delimited": tf_columns, "criteo": tf_criteo}[name]
    batches = each.batch(BATCH, drop_remainder=True, num_parallel_calls=tf.data.AUTOTUNE)
    return batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def tf_examples(records: Any) -> Any:
    """Parse a batch of ``tf.train.Example``."""
    import tensorflow as tf

    return tf.io.parse_example(records, features())


def features() -> dict[str, Any]:
    """Return the features of ``tf.train.Example``."""
    import tensorflow as tf

    return {
        "ids": tf.io.FixedLenFeature([IDS], tf.int64),
        "dense": tf.io.FixedLenFeature([DENSE], tf.float32),
        "label": tf.io.FixedLenFeature([1], tf.float32),
    }


def tf_columns(lines: Any) -> Any:
    """Parse a batch of comma-separated lines."""
    import tensorflow as tf

    defaults = [tf.zeros(1, tf.int64) if kind == "int64" else tf.zeros(1) for kind in COLUMNS.values()]
    return dict(zip(COLUMNS, tf.io.decode_csv(lines, defaults, use_quote_delim=False), strict=True))


def tf_criteo(lines: Any) -> Any:
    """Parse a batch of Criteo's lines: hexadecimal digits by arithmetic on bytes; -1 for a missing category."""
    import tensorflow as tf

    defaults: list[Any] = [tf.zeros(1, tf.int32), *[tf.zeros(1)] * COUNTS, *[tf.constant([""])] * CATEGORIES]
    label, *rest = tf.io.decode_csv(lines, defaults, field_delim="\t", use_quote_delim=False)
    texts = tf.stack(rest[COUNTS:], axis=1)
    letters = tf.cast(tf.io.decode_raw(texts, tf.uint8, fixed_length=8), tf.int64)
    digits = tf.bitwise.bitwise_and(letters, 15) + 9 * tf.bitwise.right_shift(letters, 6)
    shifts = tf.constant([28, 24, 20, 16, 12, 8, 4, 0], tf.int64)  # all values have eight digits
    values = tf.reduce_sum(tf.bitwise.left_shift(digits, shifts), axis=2)
    categories = tf.where(tf.equal(texts, ""), tf.constant(-1, tf.int64), values)
    return {"counts": tf.stack(rest[:COUNTS], axis=1), "categories": categories}, label


def pyarrow_batches(name: str, order: str, files: list[str], rows: int) -> Iterator[Any]:
    """Yield columns as NumPy arrays from pyarrow's scanner."""
    import pyarrow as pa
    from pyarrow import csv, dataset

    form: Any = "parquet"
    if name == "delimited":
        types = {column: pa.from_numpy_dtype(kind) for column, kind in COLUMNS.items()}
        form = dataset.CsvFileFormat(
            csv.ParseOptions(quote_char=False),
            convert_options=csv.ConvertOptions(column_types=types),
            read_options=csv.ReadOptions(column_names=[*COLUMNS]),
        )
    for batch in dataset.dataset(files, format=form).to_batches(batch_size=BATCH):
        yield {column: batch[column].to_numpy(zero_copy_only=False) for column in COLUMNS}


def grain_batches(name: str, order: str, files: list[str], rows: int) -> Iterable[Any]:
    """Return Grain's dataset of ArrayRecord files, which gets and parses whole batches.

    ``MapDataset.source(...).batch(...)`` would read record by record, at 0.3 ms each.
    """
    import grain
    import tensorflow as tf

    parse = tf.function(tf_examples, input_signature=[tf.TensorSpec([None], tf.string)])
    source = grain.sources.ArrayRecordDataSource(files)

    def read(numbers: Any) -> dict[str, Any]:
        records = source.__getitems__(numbers.tolist())
        return {key: value.numpy() for key, value in parse(tf.constant(records)).items()}

    numbers = grain.MapDataset.range(len(source))
    if order == "full":
        numbers = numbers.shuffle(seed=0)
    elif order == "blocks":
        numbers = grain.experimental.WindowShuffleMapDataset(numbers, window_size=WINDOW, seed=0)
    batches = numbers.batch(BATCH, drop_remainder=True).map(read)
    return batches.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))


def torch_batches(name: str, order: str, files: list[str], rows: int) -> Iterable[Any]:
    """Return PyTorch's DataLoader of memory-mapped arrays."""
    import numpy as np
    import torch
    from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

    arrays = [np.load(file, mmap_mode="r") for file in files]
    starts = np.cumsum([0, *map(len, arrays)])

    class Rows(Dataset):
        def __len__(self) -> int:
            return int(starts[-1])

        def __getitem__(self, rows: list[int]) -> torch.Tensor:
            wanted = np.asarray(rows)
            batch = np.empty((len(wanted), *arrays[0].shape[1:]), arrays[0].dtype)
            for start, stop, array in zip(starts, starts[1:], arrays, strict=False):
                here = np.flatnonzero((wanted >= start) & (wanted < stop))
                if len(here):
                    batch[here] = array[wanted[here] - start]
            return torch.from_numpy(batch)

    torch.set_num_threads(1)
    data = Rows()
    sampler = RandomSampler(data) if order == "full" else SequentialSampler(data)
    return DataLoader(data, batch_size=None, sampler=BatchSampler(sampler, BATCH, drop_last=True))


READERS: dict[str, Callable[[str, str, list[str], int], Iterable[Any]]] = {
    "tf": tf_batches,
    "pyarrow": pyarrow_batches,
    "grain": grain_batches,
    "torch": torch_batches,
}
