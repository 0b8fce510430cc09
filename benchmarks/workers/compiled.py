"""One rank of benchmarks/compiled.py: train a model with and without XLA, in turn.

A variant trains two epochs per turn, and only the second is timed; XLA compiles in the first. All variants run in one
process, so that a slow minute of the machine affects all of them. models/ is on the path.
"""

from __future__ import annotations

from collections.abc import Callable

import hvdkit as hk

# isort: split
import keras
import numpy as np
from fit import Clock, Clocked, clicks, images, turns
from timing import leave, meet, parser

from hvdkit.keras import measured_function

layers = keras.layers
# Examples per rank.
BATCH = {"lstm": 32, "transformer": 16, "mlp": 64, "convolutions": 64, "resnet50": 8, "clicks": 500}


def main() -> None:
    """Write the milliseconds of every variant in every round."""
    options = parser(__doc__)
    options.add_argument("--model", choices=BATCH, default="lstm")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--alone", action="store_true", help="Keras's fit, without other ranks")
    options.add_argument("--only", default="", help="run this variant only")
    options.add_argument("--auto", action="store_true", help="train until HVDKIT_JIT_COMPILE=auto has chosen")
    args = options.parse_args()
    hk.init()
    batch = BATCH[args.model] * hk.size()
    work = {
        "lstm": lstm,
        "transformer": transformer,
        "mlp": mlp,
        "convolutions": images,
        "resnet50": resnet50,
        "clicks": clicks,
    }[args.model]
    if args.auto:
        choose(work, batch, args.steps)
        return
    if args.alone:
        made = {"keras": by_fit(work, batch, args.steps, False), "xla": by_fit(work, batch, args.steps, True)}
    else:
        made = {"off": by_hk_fit(work, batch, args.steps, False), "on": by_hk_fit(work, batch, args.steps, True)}
    variants = {name: run for name, run in made.items() if args.only in ("", name)}
    number = args.number if args.alone else hk.rank()
    rounds = []
    for index in range(-1, args.rounds):
        meet(args.folder, number, args.processes, f"round{index}")
        rounds.append(turns(variants, index, args.steps))
    figures = {
        f"{variant} {key} {r}": n for r, each in enumerate(rounds[1:]) for variant, f in each.items() for key, n in f
    }
    leave(args.folder, number, figures)
    hk.barrier()


def choose(work, batch: int, steps: int) -> None:
    """Train for as many steps as HVDKIT_JIT_COMPILE=auto needs, which then logs its choice."""
    measured_function.AFTER_SECONDS = 0.0
    model, loss, (x, y) = work(batch * steps)
    model.compile(keras.optimizers.Adam(1e-3), loss(from_logits=True))
    hk.fit(model, x, y, batch_size=batch, epochs=-(-120 // steps), verbose=0)


def classifier(model: keras.Model, examples: int, shape: tuple[int, ...]):
    """Return a model, its loss class, and data for it."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=(examples, *shape)).astype("float32"), rng.integers(0, 10, examples)
    return model, keras.losses.SparseCategoricalCrossentropy, data


def lstm(examples: int):
    """Return an LSTM of 128 units over 50 steps."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((50, 32)), layers.LSTM(128), layers.Dense(10)])
    return classifier(model, examples, (50, 32))


def transformer(examples: int):
    """Return three blocks of attention over 64 tokens of 128 numbers."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64, 128))
    x = inputs
    for _ in range(3):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(128)(layers.Dense(512, "gelu")(x)))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    return classifier(model, examples, (64, 128))


def mlp(examples: int):
    """Return four dense layers of 512 units."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), *[layers.Dense(512, "relu") for _ in range(4)], layers.Dense(10)])
    return classifier(model, examples, (64,))


def resnet50(examples: int):
    """Return ResNet-50 for images of 32 x 32."""
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None)
    return classifier(model, examples, (32, 32, 3))


def by_hk_fit(work, batch: int, steps: int, jit_compile: bool) -> Callable[[], Clocked]:
    """Return a timed hk.fit."""
    return _fitting(lambda *args, **options: hk.fit(*args, **options), work, batch, steps, jit_compile)


def by_fit(work, batch: int, steps: int, jit_compile: bool) -> Callable[[], Clocked]:
    """Return a timed Keras fit, on one rank."""
    return _fitting(lambda model, *args, **options: model.fit(*args, **options), work, batch, steps, jit_compile)


def _fitting(fit, work, batch: int, steps: int, jit_compile: bool) -> Callable[[], Clocked]:
    model, loss, (x, y) = work(batch * steps)
    model.compile(keras.optimizers.Adam(1e-3), loss(from_logits=True), jit_compile=jit_compile)

    def run() -> Clocked:
        clock = Clock()
        fit(model, x, y, batch_size=batch, epochs=2, verbose=0, callbacks=[clock])
        return clock.epoch

    return run


if __name__ == "__main__":
    main()
