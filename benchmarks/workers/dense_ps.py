"""One process of a parameter server cluster for benchmarks/dense.py: a server, a worker, or the coordinator.

The coordinator schedules steps. The next free worker runs each step on its own batch: it reads the variables from the
server, computes the gradients, and has the server update the variables. Workers do not wait for each other, so no step
spans all workers. A step's time is the time in which all workers together compute one batch per worker: the time of K
scheduled steps x workers / K.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from dense_tf import RATE, network
from timing import leave, parser

WARM_UP = 8
DONE = "done"  # file that ends servers and workers


def main() -> None:
    """Serve until the coordinator is done, or coordinate and write milliseconds per step."""
    options = parser(__doc__)
    options.add_argument("--role", choices=["ps", "worker", "chief"], required=True)
    options.add_argument("--model", default="cifar10")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--ports", type=int, nargs="+", help="of the server, the coordinator and the workers")
    args = options.parse_args()
    take_part(args, [f"127.0.0.1:{port}" for port in args.ports], coordinate)


def take_part(args, addresses: list[str], coordinate: Callable[..., None]) -> None:
    """Join the cluster of a server, a coordinator and workers in the role ``args.role``."""
    cluster = {"ps": addresses[:1], "chief": addresses[1:2], "worker": addresses[2:]}
    task = {"type": args.role, "index": args.number}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    if args.role == "chief":
        coordinate(args, len(cluster["worker"]))
    else:
        serve(args, 1 if args.role == "ps" else 2 + args.number)


def serve(args, number: int) -> None:
    """Run a server or a worker until the coordinator is done."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    # A step blocks while waiting for the server, so other ops need a second thread.
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=4)
    tf.distribute.Server(resolver.cluster_spec(), job_name=args.role, task_index=args.number, config=config)
    while not (args.folder / DONE).exists():
        time.sleep(0.1)
    leave(args.folder, number, {})


def coordinate(args, workers: int) -> None:
    """Train on all workers."""
    import tensorflow as tf

    strategy, coordinator = coordinated()
    with strategy.scope():
        model, loss_of, *batch = network(args)
    variables = on_the_server([v.value for v in model.trainable_variables])
    batch = [x.numpy() for x in batch]  # constants of the graph: tensors would be sent to the worker for every step

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(*map(tf.constant, batch))
        for variable, grad in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * grad)
        return loss

    leave(args.folder, 0, {"ms": milliseconds(coordinator, step, workers, WARM_UP, args.steps)})
    (args.folder / DONE).touch()


def coordinated():
    """Return the strategy, and the coordinator of its cluster."""
    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


def on_the_server(variables: list) -> list:
    """Return the variables, or raise an error if the server does not hold all of them."""
    if not all("/job:ps" in variable.device for variable in variables):
        raise RuntimeError(f"variables are on {variables[0].device}, expected them on /job:ps")
    return variables


def milliseconds(coordinator, step, workers: int, warm_up: int, steps: int) -> float:
    """Return the time in which all workers together run a step each, after ``warm_up`` such times."""
    for times in (warm_up, steps):
        started = time.perf_counter()
        for _ in range(times * workers):
            coordinator.schedule(step)
        coordinator.join()
    return 1000 * (time.perf_counter() - started) / steps


if __name__ == "__main__":
    main()
