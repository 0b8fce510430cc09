"""One process of a parameter server cluster for benchmarks/ring.py; only the coordinator shares the server's host.

Workers read variables of a given size from the server and have it add the same number of bytes, in place of
gradients. As in dense_ps.py, workers do not wait for each other: a step's time is the time in which all workers
together do this once per worker.
"""

from __future__ import annotations

from functools import partial

from dense_ps import DONE, coordinated, milliseconds, on_the_server, take_part
from timing import leave, parser

TENSORS = 8


def main() -> None:
    """Serve until the coordinator is done, or coordinate and write milliseconds by size."""
    options = parser(__doc__)
    options.add_argument("--role", choices=["ps", "worker", "chief"], required=True)
    options.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes of float32")
    options.add_argument("--addresses", nargs="+", required=True, help="of the server, the coordinator and the workers")
    args = options.parse_args()
    take_part(args, args.addresses, coordinate)


def coordinate(args, workers: int) -> None:
    """Run reads and updates on all workers."""
    import tensorflow as tf

    strategy, coordinator = coordinated()
    found = {}
    for size in args.sizes:
        with strategy.scope():
            held = on_the_server([tf.Variable(tf.ones([max(1, size // 4 // TENSORS)])) for _ in range(TENSORS)])
        found[f"ms_{size}"] = milliseconds(coordinator, tf.function(partial(update, held)), workers, 2, args.steps)
    leave(args.folder, 0, found)
    (args.folder / DONE).touch()


def update(held) -> None:
    """Read every variable, and add the same number of bytes to it."""
    import tensorflow as tf

    for variable in held:
        with tf.device("/job:worker"):  # otherwise TensorFlow would compute on the server, and send nothing
            change = 1e-9 * tf.random.uniform(variable.shape) * variable.read_value()
        variable.assign_add(change)


if __name__ == "__main__":
    main()
