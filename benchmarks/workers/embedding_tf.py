"""One process of benchmarks/embedding.py under TensorFlow: look up rows, compute a loss, update the rows."""

from __future__ import annotations

from unittest import mock

import numpy as np
from timing import parser, time_steps

WARM_UP, BATCHES = 24, 8
ROWS, WIDTH, FEATURES, SAMPLES = 1_000_000, 64, 26, 4096
# 26 tables as in recommenders: a few large ones, many small ones, three widths.
SIZES = [400_000, 200_000, 100_000, 50_000] + [20_000] * 6 + [5_000] * 8 + [1_000] * 8
WIDTHS = [64, 32, 64, 16, *([32, 64, 16] * 8)]
MANY = {f"t{i}": shape for i, shape in enumerate(zip(SIZES, WIDTHS, strict=False))}
TABLES = {"one": {"table": (ROWS, WIDTH)}, "many": MANY}  # rows and width


def main() -> None:
    """Train, and write this process's median milliseconds per step."""
    options = parser(__doc__)
    options.add_argument("variant", choices=["plain", "hvdkit", "sparse", "dense"])
    options.add_argument("--work", choices=["one", "many"], default="one")
    options.add_argument("--optimizer", choices=["sgd", "adagrad", "adam"], default="sgd")
    options.add_argument("--ahead", action="store_true", help="hvdkit: each step sends the next one's ids")
    args = options.parse_args()
    start = {"plain": plain, "hvdkit": with_hvdkit, "sparse": with_horovod, "dense": with_horovod}[args.variant]
    step, rank, barrier, extra = start(args)
    time_steps(args, lambda number: float(step(number)), rank, warm_up=WARM_UP, before=barrier, extra=extra)


def ids_of(work: str, rank: int) -> list[dict]:
    """Return some batches of ids: Zipf(1.2) in each feature, with different frequent ids per feature."""
    import tensorflow as tf

    rng = np.random.default_rng(rank)
    if work == "one":
        shift = np.arange(FEATURES) * (ROWS // FEATURES)
        return [
            {"table": tf.constant((rng.zipf(1.2, (SAMPLES, FEATURES)) + shift) % ROWS, tf.int64)}
            for _ in range(BATCHES)
        ]
    made = []
    for _ in range(BATCHES):
        batch = {}
        for name, (rows, _) in TABLES[work].items():
            lengths = rng.integers(0, 4, SAMPLES)
            flat = rng.zipf(1.2, lengths.sum()) % rows
            batch[name] = tf.RaggedTensor.from_row_lengths(tf.constant(flat, tf.int64), lengths)
        made.append(batch)
    return made


def keras_optimizer(name: str):
    """Return a Keras optimizer."""
    from hvdkit.commands.measure.workloads import optimizer  # not before the framework that is measured

    return optimizer(name, 0.01)


def loss_of(found):
    """Return the mean square of all vectors."""
    import tensorflow as tf

    return tf.add_n([tf.reduce_mean(tf.square(vectors)) for vectors in found])


def replicated(args):
    """Return whole tables, and a lookup of all features in them with TensorFlow's own ops."""
    import tensorflow as tf

    tables = {name: tf.Variable(tf.random.uniform(shape, -0.05, 0.05)) for name, shape in TABLES[args.work].items()}

    def look_up(ids):
        if args.work == "one":
            return [tf.gather(tables["table"], ids["table"])]
        return [tf.nn.embedding_lookup_sparse(tables[n], i.to_sparse(), None, combiner="sum") for n, i in ids.items()]

    return tables, look_up


def plain(args):
    """One process with a whole table, ``tf.gather`` and ``scatter_sub``."""
    return replicated_step(args, 0, lambda tape: tape), 0, lambda: None, dict


def with_horovod(args):
    """Replicated tables on raw Horovod: gather sparse gradients ("sparse"), or reduce them as dense ones ("dense")."""
    import horovod.tensorflow as hvd

    hvd.init()
    import tensorflow as tf

    def tape_of(tape):
        return hvd.DistributedGradientTape(tape, sparse_as_dense=args.variant == "dense")

    return replicated_step(args, hvd.rank(), tape_of), hvd.rank(), lambda: hvd.allreduce(tf.zeros([])), dict


def replicated_step(args, rank, tape_of):
    """Return a step on replicated tables; ``tape_of`` wraps the tape. SGD updates tables without Keras."""
    import tensorflow as tf

    tables, look_up = replicated(args)
    batches, variables = ids_of(args.work, rank), list(tables.values())
    optimizer = keras_optimizer(args.optimizer)
    optimizer.build(variables)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = loss_of(look_up(ids))
        grads = tape_of(tape).gradient(loss, variables)
        if args.optimizer != "sgd":
            optimizer.apply(grads, variables)
            return loss
        for table, grad in zip(variables, grads, strict=True):
            if isinstance(grad, tf.IndexedSlices):
                table.scatter_sub(tf.IndexedSlices(0.01 * grad.values, grad.indices))
            else:
                table.assign_sub(0.01 * grad)
        return loss

    return lambda number: step(batches[number % BATCHES])


def sharded(work):
    """Return the layer, its lookup of all features (from ids or requested rows), and a function to request rows."""
    import hvdkit as hk

    if work == "one":
        layer = hk.layers.ShardedEmbedding(ROWS, WIDTH, seed=1)
        layer.build()

        def look_up(ids):
            return [layer(ids["table"] if isinstance(ids, dict) else ids)]

        return layer, look_up, lambda ids: layer.ask(ids["table"])
    tables = [hk.layers.Table(name, *shape, combiner="sum") for name, shape in TABLES[work].items()]
    layer = hk.layers.ShardedEmbeddingCollection(tables, seed=1)
    layer.build()
    return layer, lambda ids: list(layer(ids).values()), layer.ask


def with_hvdkit(args):
    """Sharded tables and hvdkit's optimizer, with its defaults."""
    import hvdkit as hk

    cluster = hk.init()
    import tensorflow as tf

    layer, look_up, ask = sharded(args.work)
    optimizer = hk.DistributedOptimizer(keras_optimizer(args.optimizer))
    optimizer.build(layer.trainable_variables)
    number = args.number or cluster.rank
    batches = ids_of(args.work, number)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = loss_of(look_up(ids))
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return loss

    @tf.function
    def step_ahead(asked, following):
        following = ask(following)
        return following, step(asked)

    asked = ask(batches[0]) if args.ahead else None

    def run(number):
        nonlocal asked
        if not args.ahead:
            return step(batches[number % BATCHES])
        asked, loss = step_ahead(asked, batches[(number + 1) % BATCHES])
        return loss

    held = sum(int(np.prod(v.shape)) * 4 for v in layer.weights)

    def extra():
        sent, made = exchanged(lambda ids: loss_of(look_up(ids)), layer, batches[0])
        needed = hk.allreduce(needed_bytes(layer, batches[0]), hk.Sum)
        return {"table_mb": held / 2**20, "bytes_ratio": hk.allreduce(sent, hk.Sum) / needed, "alltoalls": made}

    return run, number, hk.barrier, extra


def needed_bytes(layer, batch) -> int:
    """Return the bytes that one rank has to exchange: each distinct id, its row, and the row's gradient."""
    store = getattr(layer, "_collection", layer)._store
    needed = 0
    for name, ids in batch.items():
        table = next(iter(store.tables)) if name == "table" else name
        if table not in store.replicated:
            distinct = np.unique(np.asarray(getattr(ids, "flat_values", ids)))
            needed += len(distinct) * (4 + 2 * 4 * store.tables[table].output_dim)
    return needed


def exchanged(loss, layer, batch) -> tuple[int, int]:
    """Repeat a step's lookup and gradient; return the bytes sent by this rank (also to itself) and collectives."""
    import tensorflow as tf

    from hvdkit.collectives import tensors

    sent, real = [], tensors.alltoall

    def counting(x, splits, name):
        sent.append(int(tf.size(x)) * x.dtype.size)
        return real(x, splits, name)

    with mock.patch.object(tensors, "alltoall", counting):
        with tf.GradientTape() as tape:
            value = loss(batch)
        tape.gradient(value, [v.value for v in layer.trainable_variables])
    return sum(sent), len(sent)


if __name__ == "__main__":
    main()
