"""The cost of a step in counts: a guard against regressions that does not depend on the load of the machine."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.counting import Exchange, PythonCalls, counting

import hvdkit as hk
from hvdkit.keras import data_end, metric_combiner
from hvdkit.sharding.id_checks import FAULT_CODE_LENGTH
from hvdkit.supervisor import agreements
from hvdkit.supervisor.pace import Pace

opts = keras.optimizers
SHAPES = [(8, 16), (16,), (16, 4), (4,)]
NUMBERS = sum(int(np.prod(shape)) for shape in SHAPES)
ALL_GRADIENTS = Exchange("allreduce", 4, 1, 4 * NUMBERS)
ROWS, STEPS = 32, 24
# Python functions called per step in addition to the step itself. TensorFlow calls some 700 for any tf.function.
MOST_CALLS_OF_A_LOOP, MOST_CALLS_OF_CALLBACKS = 85, 58
STEP_FUNCTIONS = ("one_step_on_data", "multi_step_on_iterator")  # Keras's
MOST_CALLS_OF_HK_FIT = {"one rank": 15, "several": 100}
X = np.random.default_rng(0).normal(size=(ROWS * STEPS, 8)).astype(np.float32)
Y = X[:, :4] * 2


@pytest.fixture
def counts():
    data_end._sum_in_graph.cache_clear()  # an earlier test's graph counts nothing
    with counting() as counted:
        yield counted


def among(size, *exchanges):
    """Return the exchanges of several ranks; a single rank exchanges nothing."""
    return list(exchanges) if size > 1 else []


def update_of(optimizer):
    """Return a step that applies gradients of a small dense network, multiplied by its argument."""
    variables = [keras.Variable(np.zeros(shape, "f4")) for shape in SHAPES]
    optimizer.build(variables)
    return tf.function(lambda x: optimizer.apply([x * tf.ones(v.shape) for v in variables], variables))


def network(optimizer=None):
    """Return a small dense network with equal initial values on all ranks."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
    if optimizer is not None:
        model.compile(optimizer, "mse", jit_compile=False)
    return model


def step_of(model, optimizer):
    """Return a hand-written training step."""

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return train_step


# ---- exchanges and bytes of one update ------------------------------------------------------------------------


def of_bf16(size):
    """Two phases of a ring: every rank receives its shard of all numbers, and the sums are gathered."""
    share = -(-NUMBERS // size)
    return [Exchange("alltoall", 1, 1, 2 * share * size), Exchange("allgather", 1, 1, 2 * share)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, lambda size: [ALL_GRADIENTS]),
        ({"op": hk.Sum}, lambda size: [ALL_GRADIENTS]),
        ({"clip_global_norm": 1.0}, lambda size: [ALL_GRADIENTS]),
        ({"compression": "fp16"}, lambda size: [ALL_GRADIENTS._replace(bytes=2 * NUMBERS)]),
        ({"compression": "bf16"}, of_bf16),
        ({"op": None}, lambda size: []),
    ],
    ids=["average", "sum", "clipped", "fp16", "bf16", "none"],
)
def test_an_update_is_one_exchange_of_all_gradients(options, expected, counts, size):
    update = update_of(hk.DistributedOptimizer(opts.SGD(0.1), **options))
    update(tf.constant(1.0))
    counts.look()
    update(tf.constant(2.0))
    assert counts.exchanges() == among(size, *expected(size))
    assert not counts.traced and counts.eager() == 0


@pytest.mark.core
def test_steps_that_only_add_up_exchange_nothing(counts, size):
    update = update_of(hk.DistributedOptimizer(opts.SGD(0.1), accumulate_steps=3))
    update(tf.constant(1.0))
    seen = []
    for _ in range(5):
        counts.look()
        update(tf.constant(2.0))
        seen.append(counts.exchanges())
    once = among(size, ALL_GRADIENTS)
    assert seen == [[], once, [], [], once]


def test_a_weighted_average_sends_one_number_more(counts, size):
    w = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    step = tf.function(lambda n: hk.average_gradients([v + 1.0 for v in w], weight=n))
    step(tf.constant(2.0))
    counts.look()
    step(tf.constant(3.0))
    assert counts.exchanges() == among(size, Exchange("allreduce", 1, 1, 8), ALL_GRADIENTS)


# ---- sparse gradients and sharded tables ----------------------------------------------------------------------


def test_sparse_gradients_travel_as_rows_while_these_are_fewer_bytes(counts, size):
    """As rows, as long as the dense form takes more bytes in the ring; tiny tables are always sent dense."""
    table, tiny = (keras.Variable(np.zeros((rows, 8), "f4")) for rows in (4000, 10))
    optimizer = hk.DistributedOptimizer(opts.SGD(0.1))
    optimizer.build([table, tiny])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, ids)) + tf.reduce_sum(tf.gather(tiny.value, ids % 10))
        optimizer.apply(tape.gradient(loss, [table.value, tiny.value]), [table, tiny])

    few, many = np.repeat(np.arange(20) * 7, 3), np.arange(4000)
    step(few)
    together, number = Exchange("allreduce", 1, 1, 10 * 8 * 4), Exchange("allreduce", 1, 1, 8)
    rows = [Exchange("allgather", 1, 1, 20 * 8 * 4), Exchange("allgather", 1, 1, 20 * 4)]
    dense = Exchange("allreduce", 1, 1, 4000 * 8 * 4)
    for ids, large in ((few, rows), (many, [dense] if size > 1 else rows)):
        counts.look()
        step(ids)
        assert sorted(counts.exchanges()) == sorted(among(size, together, number, *large))


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_a_lookup_in_all_tables_is_two_alltoalls_and_its_gradient_one(compression, counts, rank, size):
    """Distinct ids out, their rows back, the rows' gradients out: 4 + 2 * 4 * width bytes a row; 16 bits halve both."""
    tables = [hk.layers.Table(f"t{i}", 500, 4 * (i + 1), combiner="sum") for i in range(3)]
    layer = hk.layers.ShardedEmbeddingCollection(
        tables, dict.fromkeys(["t0", "t1", "t2"], "row"), seed=1, compression=compression
    )
    layer.build()
    optimizer = hk.DistributedOptimizer(opts.Adagrad(0.1), clip_global_norm=1.0)
    optimizer.build(layer.trainable_variables)
    rng = np.random.default_rng(rank)
    batches = [{f"t{i}": rng.integers(0, 500, (30, 4)) for i in range(3)} for _ in range(2)]

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) for v in layer(ids, training=True).values()])
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)

    step(batches[0])
    counts.look()
    step(batches[1])
    seen = counts.exchanges()
    rows = [len(np.unique(ids)) for ids in batches[1].values()]
    distinct, numbers = sum(rows), sum(n * t.output_dim for n, t in zip(rows, tables, strict=True))
    width = 4 if compression is None else 2  # bytes of a number
    header = FAULT_CODE_LENGTH + len(layer.trainable_variables)  # to each rank
    gradients, norm = Exchange("alltoall", 1, 1, numbers * width), Exchange("allreduce", 1, 1, 8)
    ids = Exchange("alltoall", 1, 1, 4 * (distinct + size * header))
    assert not counts.traced
    assert [(e.kind, e.tensors, e.runs) for e in seen] == among(size, *[("alltoall", 1, 1)] * 3, ("allreduce", 1, 1))
    if size > 1:
        assert [seen[0], *seen[2:]] == [ids, gradients, norm]
        # The rows that a rank sends are those that others requested; the sums over all ranks are equal.
        assert hk.allreduce(seen[1].bytes, hk.Sum) == hk.allreduce(numbers, hk.Sum) * width


# ---- loops and fit --------------------------------------------------------------------------------------------


def test_a_smaller_last_batch_traces_a_step_once_more(counts, size):
    optimizer = hk.DistributedOptimizer(opts.SGD(0.1))
    train_step = step_of(network(), optimizer)
    traces = []
    for rows in (ROWS, ROWS, ROWS - 3, ROWS, ROWS - 3):
        train_step(tf.constant(X[:rows]), tf.constant(Y[:rows]))
        traces.append(train_step.experimental_get_tracing_count())
    assert traces == [1, 1, 2, 2, 2]
    assert counts.traced == {"train_step": 2}  # and nothing else
    for _ in range(2):
        counts.look()
        train_step(tf.constant(X[:ROWS]), tf.constant(Y[:ROWS]))
        assert counts.exchanges() == among(size, ALL_GRADIENTS)


class Ticks:
    """A clock that advances by 1/128 s per step, so that agreements come at known steps."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(agreements, "Pace", lambda seconds: Pace(seconds, clock=lambda: self.now))

    def tick(self):
        self.now += 1 / 128


# After the first two steps, the interval grows fourfold each time up to 0.25 s, here 32 steps.
AGREEMENTS = [1, 2, 6, 22]


def test_a_supervised_loop_exchanges_objects_at_agreements_and_summaries_only(counts, size, shared_path, monkeypatch):
    clock = Ticks(monkeypatch)
    model, optimizer = network(), hk.DistributedOptimizer(opts.SGD(0.1))
    train_step = step_of(model, optimizer)
    batches = hk.data.GlobalBatches((X, Y), ROWS * size, shuffle_seed=0, as_tensors=True)
    log = hk.callbacks.StepLog(ROWS, every=10)
    options = {"save_model_secs": None, "summary_steps": 12, "check_steps": None}
    eager, exchanged, traced = [], [], []
    with hk.Supervisor(shared_path, model=model, optimizer=optimizer, data=batches, **options) as sv:
        counts.look()
        for x, y in sv.batches(until=30):
            loss = train_step(x, y)
            clock.tick()
            sv.step(loss=loss)
            log.step(sv.global_step, loss)
            eager.append(counts.eager())
            exchanged.append(counts.exchanges())
            traced.append(sum(counts.traced.values()))
    assert exchanged == [among(size, ALL_GRADIENTS)] * 30
    assert traced == traced[:1] * 30
    due = {step: (step in AGREEMENTS) + (step % 12 == 0) for step in range(1, 31)}
    assert eager == [due[step] if size > 1 else 0 for step in range(1, 31)]
    assert train_step.experimental_get_tracing_count() == 1


class Watch(keras.callbacks.Callback):
    """Record what is exchanged and traced in each step of ``fit``.

    Must be last, so that the work of other callbacks at an epoch's end counts with its last step.
    """

    def __init__(self, counts, clock):
        super().__init__()
        self.counts, self.clock = counts, clock
        self.eager, self.exchanged, self.traced = [], [], []

    def on_train_begin(self, logs=None):
        self.counts.look()

    def on_train_batch_begin(self, batch, logs=None):
        if batch:
            self.note()
        self.clock.tick()

    def on_epoch_end(self, epoch, logs=None):
        self.note()

    def note(self):
        self.eager.append(self.counts.eager())
        self.exchanged.append(self.counts.exchanges())
        self.traced.append(sum(self.counts.traced.values()))
        self.counts.traced.clear()


def test_fit_exchanges_gradients_and_nothing_else(counts, size, shared_path, monkeypatch):
    """The exceptions are objects at agreements, summaries and log lines, and metrics at an epoch's end."""
    clock = Ticks(monkeypatch)
    batches = hk.data.GlobalBatches((X, Y), ROWS * size, shuffle_seed=0, remainder="drop")
    steps, epochs = batches.steps_per_epoch, 30 // batches.steps_per_epoch
    model, watch = network(hk.DistributedOptimizer(opts.SGD(0.1))), Watch(counts, clock)
    options = {"save_model_secs": None, "summary_steps": 12, "check_steps": None}
    callbacks = [
        hk.callbacks.SupervisorCallback(shared_path, data=batches, **options),
        hk.callbacks.MetricAverage(),
        hk.callbacks.StopOnNonFinite(),
        hk.callbacks.StepLog(ROWS * size, every=10),
        hk.callbacks.LearningRateWarmup(steps=5),
        watch,
    ]
    model.fit(batches.as_keras(), epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False)
    trained = range(1, epochs * steps + 1)
    assert watch.exchanged == [among(size, ALL_GRADIENTS)] * len(trained)
    due = [(s in AGREEMENTS) + (s % 12 == 0) + (s % 10 == 0) + (s % steps == 0) for s in trained]
    # Weights are compared before the first step and after the first epoch, decisions of callbacks before the next one.
    due = [n + (s == steps) + (s % steps == 1) for n, s in zip(due, trained, strict=True)]
    assert watch.eager == (due if size > 1 else [0] * len(trained))
    assert watch.traced[0] > 0 and not any(watch.traced[1:])


# ---- hk.fit and hk.evaluate -----------------------------------------------------------------------------------


def given(kind, batch_size):
    """Return the arguments of ``hk.fit`` for all examples."""
    if kind == "arrays":
        return {"x": X, "y": Y, "batch_size": batch_size}
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)
    return {"x": data.filter(lambda *_: True) if kind == "dataset of unknown length" else data}


def with_metrics():
    """Return the small network with several metrics."""
    model = network()
    model.compile(opts.SGD(0.1), "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()], jit_compile=False)
    return model


METRICS = 3 * 2  # sum and count of the loss and two metrics


@pytest.fixture
def combined(monkeypatch):
    """Record the number of states in each grouped allreduce of metrics."""
    seen, real = [], metric_combiner.grouped_allreduce

    def counted(states, *args, **options):
        seen.append(len(states))
        return real(states, *args, **options)

    monkeypatch.setattr(metric_combiner, "grouped_allreduce", counted)
    return seen


def each_run(exchanges):
    """Return the exchanges with one entry for each run."""
    return [
        Exchange(each.kind, each.tensors, 1, each.bytes // each.runs) for each in exchanges for _ in range(each.runs)
    ]


@pytest.mark.parametrize(
    ("kind", "batch_size"), [("arrays", 48), ("arrays", 50), ("dataset", 50), ("dataset of unknown length", 48)]
)
def test_hk_fit_exchanges_gradients_per_step_and_metrics_per_epoch(
    kind, batch_size, counts, combined, size, monkeypatch
):
    """Also with uneven shards, and once for validation. Data of unknown length: 4 bytes per step and at their end."""
    watch, epochs, steps = Watch(counts, Ticks(monkeypatch)), 2, -(-len(X) // batch_size)
    own = given(kind, batch_size)
    validation = (X, Y) if kind == "arrays" else own["x"]
    hk.fit(with_metrics(), **own, epochs=epochs, validation_data=validation, callbacks=[watch], verbose=0)
    # For the metrics of training and of validation.
    assert combined == ([METRICS] * 2 * epochs if size > 1 else [])
    seen = [each for step in watch.exchanged for each in step if each.kind != "broadcast"]  # the chief's weights
    expected = [ALL_GRADIENTS] * steps * epochs
    if kind == "dataset of unknown length":
        each_end = [Exchange("allreduce", 1, 1, 4)] * 2
        expected += [each_end[0]] * steps * epochs + [*each_end, Exchange("allreduce", 1, steps, 4 * steps)] * epochs
    assert sorted(each_run(seen)) == sorted(each_run(among(size, *expected)))
    # For the first batches of training and validation, their metrics, and the callbacks' hooks at the begin and end of
    # both, where an error on one rank reaches all ranks.
    assert [n for n in watch.eager[1:] if n] == ([5, 3, 5] if size > 1 else [])


def test_hk_evaluate_exchanges_metrics_once(counts, combined, size):
    model = with_metrics()
    hk.evaluate(model, X, Y, verbose=0)
    combined.clear()
    counts.look()
    hk.evaluate(model, X, Y, verbose=0)
    assert not counts.exchanges(), "weights that were equal have been sent"
    assert "one_step_on_data" not in counts.traced
    assert combined == ([METRICS] if size > 1 else [])
    # For arguments, optimizers, weights with random numbers, callbacks, the first batch, and the metrics.
    assert counts.eager() == (6 if size > 1 else 0)


def test_a_short_call_of_hk_fit_exchanges_few_objects(counts, size):
    model = with_metrics()
    call = {"x": X, "y": Y, "batch_size": 48, "verbose": 0}
    hk.fit(model, **call)
    assert counts.traced["one_step_on_data"] == 1, "the step creates variables"
    counts.look()
    hk.fit(model, **call)
    assert "broadcast" not in [each.kind for each in counts.exchanges()], "weights that were equal have been sent"
    # As above, and for the weights after the first update and the end of the epoch.
    assert counts.eager() == (8 if size > 1 else 0)


# ---- Python ---------------------------------------------------------------------------------------------------


class Profiled(keras.callbacks.Callback):
    """Count the Python functions that some steps of ``fit`` call, in Keras and in all callbacks."""

    def __init__(self):
        super().__init__()
        self.calls = PythonCalls()

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 8:  # of the steps before it, the sixth ends in an agreement
            self.calls.start()
        elif batch == 12:
            self.calls.stop()
            self.per_step = self.calls.total() / 4


def calls_in_fit(model, data, callbacks=()):
    """Return the number of Python functions that a step of ``fit`` calls."""
    profiled = Profiled()
    model.fit(data, callbacks=[profiled, *callbacks], verbose=0, shuffle=False)
    return profiled.per_step


def counted(step, number=4):
    """Count the Python functions that ``number`` calls of ``step`` call, after three calls that are not counted."""
    for _ in range(3):
        step()
    calls = PythonCalls()
    calls.start()
    for _ in range(number):
        step()
    calls.stop()
    return calls


def calls_in(step, number=4):
    """Return the mean number of Python functions that a call of ``step`` calls."""
    return counted(step, number).total() / number


def test_a_step_calls_no_more_python_for_being_distributed():
    """hvdkit's work on gradients is in the step's graph, without any Python call."""
    x, y = tf.constant(X[:ROWS]), tf.constant(Y[:ROWS])
    plain, ours = (step_of(network(), o) for o in (opts.SGD(0.1), hk.DistributedOptimizer(opts.SGD(0.1))))
    assert counted(lambda: ours(x, y)).by_file == counted(lambda: plain(x, y)).by_file


def test_a_supervised_loop_adds_few_python_calls(size, shared_path, monkeypatch):
    Ticks(monkeypatch)  # time stands still, so agreements become rarer and rarer
    model, optimizer = network(), hk.DistributedOptimizer(opts.SGD(0.1))
    train_step = step_of(model, optimizer)
    x, y = tf.constant(X[:ROWS]), tf.constant(Y[:ROWS])
    alone = calls_in(lambda: train_step(x, y))
    batches = hk.data.GlobalBatches((X, Y), ROWS * size, shuffle_seed=0, as_tensors=True)
    log = hk.callbacks.StepLog(ROWS, every=1000)
    options = {"save_model_secs": None, "summary_steps": 1000}
    with hk.Supervisor(shared_path, model=model, optimizer=optimizer, data=batches, **options) as sv:
        source = sv.batches()

        def supervised():
            loss = train_step(*next(source))
            sv.step(loss=loss)
            log.step(sv.global_step, loss)

        for _ in range(6):
            supervised()
        added = calls_in(supervised) - alone
    assert 0 < added <= MOST_CALLS_OF_A_LOOP


def test_fit_with_all_callbacks_adds_few_python_calls(counts, size, shared_path, monkeypatch):
    Ticks(monkeypatch)
    data = tf.data.Dataset.from_tensor_slices((X, Y, Y[:, 0])).batch(ROWS, drop_remainder=True)
    batches = hk.data.GlobalBatches((X, Y), ROWS, shuffle_seed=0, remainder="drop", rank=0, size=1)
    dataset = batches.as_keras()
    counts.look()
    plain = calls_in_fit(network(opts.SGD(0.1)), data)
    traced = {name: counts.traced[name] for name in STEP_FUNCTIONS}
    counts.look()
    model = network(hk.DistributedOptimizer(opts.SGD(0.1)))
    bare = calls_in_fit(model, dataset)
    assert {name: counts.traced[name] for name in STEP_FUNCTIONS} == traced
    options = {"save_model_secs": None, "summary_steps": 1000}
    callbacks = [
        hk.callbacks.SupervisorCallback(shared_path, data=batches, **options),
        hk.callbacks.MetricAverage(),
        hk.callbacks.StopOnNonFinite(),
        hk.callbacks.StepLog(ROWS * size, every=1000),
        hk.callbacks.LearningRateWarmup(steps=1),
        hk.callbacks.StopOnDivergence(every=1000),
    ]
    supervised = calls_in_fit(model, batches.as_keras(), callbacks)
    # Three of them for the variable that orders calls of the inner function.
    assert bare - plain <= 11
    # With callbacks, two for the variable with the digest of rows, one for the explanation of errors.
    assert 0 < supervised - bare <= MOST_CALLS_OF_CALLBACKS + 3


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_a_step_of_hk_fit_adds_few_python_calls_and_on_one_rank_no_operations(kind, counts, size):
    def profiled(train):
        seen = Profiled()
        counts.look()
        train(seen)
        assert counts.traced["one_step_on_data"] == 1
        return seen.per_step, {name: counts.operations[name] for name in STEP_FUNCTIONS}

    data = given(kind, ROWS)
    model, ours = network(opts.SGD(0.1)), network(opts.SGD(0.1))
    plain, operations = profiled(lambda seen: model.fit(**given(kind, ROWS), callbacks=[seen], verbose=0))
    calls, with_hvdkit = profiled(lambda seen: hk.fit(ours, **data, callbacks=[seen], verbose=0))
    assert 0 <= calls - plain <= MOST_CALLS_OF_HK_FIT["several" if size > 1 else "one rank"]
    assert size > 1 or with_hvdkit == operations
