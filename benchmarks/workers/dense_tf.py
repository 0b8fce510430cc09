"""One process of benchmarks/dense.py under TensorFlow: train a network on constant inputs in one variant."""

from __future__ import annotations

import inspect
import json
import os
import sys

from timing import parser, time_steps

RATE = 0.01


def main() -> None:
    """Train, and write this process's median milliseconds per step."""
    variants = {
        "alone": alone,
        "tied": tied,
        "hvdkit": with_hvdkit,
        "fp16": with_hvdkit,
        "sharded": with_hvdkit,
        "horovod": with_horovod,
        "multiworker": multiworker,
        "towers": towers,
    }
    options = parser(__doc__)
    options.add_argument("variant", choices=variants)
    options.add_argument("--model", default="cifar10", help="one of hvdkit.commands.measure.workloads")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--ports", type=int, nargs="*", default=(), help="one per process, for multiworker")
    options.add_argument("--towers", type=int, default=1, help="devices in this one process, for towers")
    args = options.parse_args()
    step, number = variants[args.variant](args)
    time_steps(args, lambda _: float(step()), number)


def network(args):
    """Return the network, its loss function, and a batch, the same in every process."""
    from hvdkit.commands.measure.workloads import workload  # not before the framework that is measured

    work = workload(args.model, args.batch, rank=0)
    return work.model, work.loss, *work.data[0]


def plain_step(optimizer, tape_of, model, loss_of, images, labels):
    """Return a compiled training step; ``tape_of`` wraps the tape."""
    import tensorflow as tf

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(images, labels)
        grads = tape_of(tape).gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(grads, model.trainable_variables)
        return loss

    return step


def alone(args):
    """Train without any other process."""
    import keras

    return plain_step(keras.optimizers.SGD(RATE), lambda tape: tape, *network(args)), args.number


def tied(args):
    """Train independently, but average one number over all processes before each update: the cost of waiting."""
    import tensorflow as tf

    import hvdkit as hk

    hk.init()
    import keras

    class Tape:
        def __init__(self, tape):
            self.tape = tape

        def gradient(self, loss, sources):
            grads = self.tape.gradient(loss, sources)
            with tf.control_dependencies(grads):
                number = hk.allreduce(tf.identity(loss))
            with tf.control_dependencies([number]):
                return [tf.identity(grad) for grad in grads]

    return plain_step(keras.optimizers.SGD(RATE), Tape, *network(args)), hk.rank()


def with_hvdkit(args):
    """Train with hvdkit's optimizer and its defaults, except for the option in the name."""
    import hvdkit as hk

    hk.init()
    import keras

    options = {"hvdkit": {}, "fp16": {"compression": "fp16"}, "sharded": {"shard_states": True}}[args.variant]
    if missing := set(options) - set(inspect.signature(hk.DistributedOptimizer).parameters):
        sys.exit(f"not available: DistributedOptimizer does not accept {', '.join(missing)}")
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(RATE), **options)
    return plain_step(optimizer, lambda tape: tape, *network(args)), hk.rank()


def with_horovod(args):
    """Train with Horovod's own tape, which averages gradients of TensorFlow's variables."""
    import horovod.tensorflow as hvd

    hvd.init()
    import keras

    return plain_step(keras.optimizers.SGD(RATE), hvd.DistributedGradientTape, *network(args)), hvd.rank()


def multiworker(args):
    """Train under tf.distribute.MultiWorkerMirroredStrategy, whose optimizer step averages."""
    workers = [f"127.0.0.1:{port}" for port in args.ports]
    task = {"type": "worker", "index": args.number}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        import keras

        model, loss_of, images, labels = network(args)
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)

    def replica():
        with tf.GradientTape() as tape:
            loss = loss_of(images, labels)
        grads = tape.gradient(loss, [v.value for v in model.trainable_variables])
        # Its optimizer sums gradients, so each replica divides by the number of replicas.
        grads = [g / strategy.num_replicas_in_sync for g in grads]
        optimizer.apply(grads, model.trainable_variables)
        return loss

    @tf.function
    def step():
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(replica), axis=None)

    return step, args.number


def towers(args):
    """Train a tower per device in one process, like the tutorial: variables and ``average_gradients`` on the CPU."""
    import tensorflow as tf

    # Devices share the compute threads: the towers run in parallel if as many ops may run at once.
    tf.config.threading.set_inter_op_parallelism_threads(args.towers)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * args.towers)
    import keras

    with tf.device("/CPU:0"):
        model, loss_of, images, labels = network(args)
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
    variables = [v.value for v in model.trainable_variables]

    @tf.function
    def step():
        losses, tower_grads = [], []
        for number in range(args.towers):
            with tf.device(f"/CPU:{number}"):
                with tf.GradientTape() as tape:
                    losses.append(loss_of(images, labels))
                tower_grads.append(tape.gradient(losses[-1], variables))
        with tf.device("/CPU:0"):
            averaged = [tf.reduce_mean(tf.stack(grads), 0) for grads in zip(*tower_grads, strict=True)]
            optimizer.apply(averaged, model.trainable_variables)
            return tf.add_n(losses) / args.towers

    return step, args.number


if __name__ == "__main__":
    main()
