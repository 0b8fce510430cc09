"""Train a model over all ranks.

hvdkit run -np 4 -- python models/train.py cifar10
horovodrun -np 4 python models/train.py cifar10
mpirun -np 4 python models/train.py cifar10 --form fit --steps 500
python models/train.py linear
horovodrun -np 4 python models/train.py partitioned
horovodrun -np 4 python models/train.py recommender
"""

from __future__ import annotations

import sys
import time
from typing import Annotated

import hvdkit as hk  # first: a launched rank must load TensorFlow and MPI in this order
from hvdkit.commands import parsing
from hvdkit.machine.launcher import launched_rank

# isort: split
from console import say  # before keras: it loads TensorFlow without its startup messages

# isort: split
import cifar10
import linear
import partitioned
import recommender
import training
import tyro

Command = (
    Annotated[cifar10.Config, tyro.conf.subcommand("cifar10")]
    | Annotated[linear.Config, tyro.conf.subcommand("linear")]
    | Annotated[partitioned.Config, tyro.conf.subcommand("partitioned")]
    | Annotated[recommender.Config, tyro.conf.subcommand("recommender")]
)
RUNNERS = {linear.Config: linear.run, partitioned.Config: partitioned.run, recommender.Config: recommender.run}


def main() -> None:
    """Read the command line, start the ranks and train."""
    config = parse()
    hk.init()
    RUNNERS.get(type(config), train_classifier)(config)
    hk.barrier()
    say("finished")


def train_classifier(config: cifar10.Config) -> None:
    """Build on every rank, train from the last checkpoint, evaluate, compare the ranks."""
    data = config.load()
    batches = hk.data.GlobalBatches(
        data.train,
        config.global_batch_size(),
        shuffle_seed=config.seed,
        shuffle=data.shuffle,
        remainder="drop",
        as_tensors=True,
    )
    model = config.build(data)
    model.compile(config.optimizer(), _loss(), jit_compile=False)
    average = cifar10.MovingAverage(model)
    trained_on, held_out = data.examples
    say(f"{data.name}: {trained_on} training images, {config.global_batch_size()} per step over {hk.size()} ranks")

    started = time.perf_counter()
    train = training.fit if config.form == "fit" else training.loop
    train(config, model, batches, average)
    seconds = time.perf_counter() - started

    average.swap()
    accuracy = training.evaluate(model, data)
    digest = hk.compare_variables(model.variables)
    say(f"held-out accuracy {accuracy:.4f} on {held_out} images after {config.steps} steps in {seconds:.1f} s")
    count = sum(weight.numpy().size for weight in model.trainable_variables)
    if hk.size() == 1:
        say(f"the model has {count} weights (digest {digest})")
    else:
        say(f"all {hk.size()} ranks hold the same {count} weights, bit for bit (digest {digest})")


def parse() -> Command:
    """Return the command line's config; if it has a mistake, one rank reports it and all end."""
    quiet = launched_rank().rank > 0
    try:
        return parsing.parse(Command, description=__doc__, quiet=quiet)
    except SystemExit as end:
        if quiet and end.code:
            time.sleep(30)  # if this rank exited first, the launcher would end the chief before it reports the mistake
        raise


def _loss():
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


if __name__ == "__main__":
    sys.exit(main())
