"""Convert the data passed to ``hk.fit`` to shares, and check that all ranks pass the same data."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from tensorflow.python.eager import context

from hvdkit import cluster
from hvdkit.cluster.agreement import compare, gather
from hvdkit.data import GlobalBatches
from hvdkit.errors import HvdkitError, describe
from hvdkit.training.array_shares import ArrayShares
from hvdkit.training.global_batches import GlobalBatchShares
from hvdkit.training.shares import DataRank, Shares, first_tensor


@dataclass(frozen=True, kw_only=True)
class FitData:
    """Data in the form that Keras's methods accept.

    Attributes:
        x, y, sample_weight, batch_size, steps, shuffle, class_weight: as for ``model.fit``.
        initial_epoch: initial epoch of training; None for evaluation and prediction.
        argument: the argument name, for error messages.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    steps: int | None = None
    shuffle: Any = False
    class_weight: Any = None
    initial_epoch: int | None = None
    argument: str = "x"

    def shares(self) -> Shares:
        """Return this rank's shares.

        Raises:
            ValueError: Keras does not accept the data, or the global batch has fewer rows than there are ranks.
            HvdkitError: the type of the data is not supported.
        """
        if isinstance(self.x, GlobalBatches):
            return self._of_global_batches(self.x)
        inner = data_adapters.get_data_adapter(
            x=self.x,
            y=self.y,
            sample_weight=self.sample_weight,
            batch_size=self.batch_size,
            steps_per_epoch=self.steps,
            shuffle=False if isinstance(self.x, tf.data.Dataset) else self.shuffle,  # Keras would warn
            class_weight=self.class_weight,
        )
        place = DataRank.here()
        if isinstance(inner, ArrayDataAdapter):
            self._check_rows(inner.batch_size, place)
            return ArrayShares(inner, place)
        if isinstance(inner, (TFDatasetAdapter, PyDatasetAdapter, GeneratorDataAdapter)):
            made = Shares(inner, place, goes_on=self.steps is not None)
            self._check_batched(inner.get_tf_dataset().element_spec, place)
            made.get_tf_dataset()
            return made
        remedy = "pass arrays, a batched tf.data.Dataset, a PyDataset or a generator"
        raise HvdkitError(describe(self.argument, type(self.x).__name__, "data that hk.fit divides", remedy))

    def _of_global_batches(self, batches: GlobalBatches) -> GlobalBatchShares:
        remedies = {
            "y": "make it part of the data: GlobalBatches((x, y), ...)",
            "sample_weight": "make it part of the data: GlobalBatches((x, y, sample_weight), ...)",
            "batch_size": "leave it out: global_batch_size is it",
        }
        for name, remedy in remedies.items():
            if (value := getattr(self, name)) is not None:
                got = f"{value}" if isinstance(value, int) else type(value).__name__
                raise ValueError(describe(name, f"{got}, with GlobalBatches as {self.argument}", "None", remedy))
        return GlobalBatchShares(
            batches,
            DataRank.here(),
            argument=self.argument,
            steps=self.steps,
            class_weight=self.class_weight,
            initial_epoch=self.initial_epoch,
        )

    def _check_rows(self, batch_size: int, place: DataRank) -> None:
        if batch_size < place.size:
            expected = f"at least one row for each of the {place.size} ranks"
            raise ValueError(describe("batch_size", batch_size, expected, "pass a larger batch_size, which is global"))

    def _check_batched(self, spec: Any, place: DataRank) -> None:
        first = first_tensor(spec)
        if first is None:
            remedy = "call dataset.batch(batch_size) with the global batch size"
            raise ValueError(describe(self.argument, f"elements {spec}", "batches of rows", remedy))
        if first.shape.rank is not None and first.shape[0] is not None:
            self._check_rows(first.shape[0], place)


def split(x: Any, y: Any, sample_weight: Any, validation_split: float) -> tuple[tuple[Any, Any, Any], Any]:
    """Split training and validation data as Keras does: the last rows, before any shuffling."""
    return array_slicing.train_validation_split((x, y, sample_weight), validation_split=validation_split)


def prepare(kind: str, build: Callable[[], Sequence[Shares | None]]) -> Sequence[Shares | None]:
    """Return the result of ``build``, after comparing it between ranks. An error on one rank raises on all.

    Args:
        kind: the call, with all arguments that must be equal on all ranks.
        build: returns this rank's shares.

    Raises:
        Exception: ``build`` failed on this rank.
        CollectiveMismatchError: ``build`` failed on another rank, or arguments or data differ between ranks.
    """
    made: list[Sequence[Shares | None]] = []

    def described() -> _Payload:
        made.append(build())
        return _Payload(
            seed=context.global_seed(),
            drawn=secrets.randbits(31),
            order=random.getstate() if any(map(_draws, made[0])) else None,
            sizes=[None if s is None else (type(s).__name__, s.num_batches, *_settings(s)) for s in made[0]],
            digests=[getattr(s, "digest", None) for s in made[0]],
        )

    payloads = gather(cluster.exchange(), kind, described)
    _compare(payloads)
    seeds = {each.seed for each in payloads}
    if len(seeds) > 1 or None in seeds:
        chief = payloads[0].drawn if payloads[0].seed is None else payloads[0].seed
        for shares in made[0]:
            if isinstance(shares, ArrayShares) and cluster.size() > 1:
                shares.seed = chief
    return made[0]


@dataclass(frozen=True)
class _Payload:
    """A rank's description of its data.

    Attributes:
        seed: TensorFlow's global seed, or None.
        drawn: a random seed.
        order: state of Python's random generator for a PyDataset whose batches it orders; otherwise None.
        sizes: class, number of batches and settings of the training and validation data.
        digests: digests of arrays and of the data of GlobalBatches.
    """

    seed: int | None
    drawn: int
    order: Any
    sizes: list[Any]
    digests: list[Any]


def _settings(shares: Shares) -> tuple[Any, ...]:
    """Return the settings of GlobalBatches."""
    return (shares.settings(),) if isinstance(shares, GlobalBatchShares) else ()


def _draws(shares: Shares | None) -> bool:
    """Return True for a PyDataset whose batches Keras shuffles with Python's random generator."""
    return shares is not None and isinstance(shares.inner, PyDatasetAdapter) and bool(shares.inner.shuffle)


def _compare(payloads: list[_Payload]) -> None:
    states = "another state of Python's random", "equal states"
    remedy = "call keras.utils.set_random_seed(seed) on every rank, or pass shuffle=False"
    compare([each.order for each in payloads], "shuffle", remedy, show=lambda *_: states)
    sizes = zip(*(each.sizes for each in payloads), strict=True)
    for name, ranks in zip(("x", "validation_data"), sizes, strict=False):
        compare(ranks, name, "pass the same data on every rank", show=_shown_sizes)
    remedy = "seed what draws or shuffles them (keras.utils.set_random_seed), or load the same files"
    digests = zip(*(each.digests for each in payloads), strict=True)
    for name, ranks in zip(("x, y", "validation_data"), digests, strict=False):
        compare(ranks, name, remedy, show=lambda *_: ("other data", "the whole data set"))


def _shown_sizes(odd: Any, usual: Any) -> tuple[str, str]:
    return f"{odd} (class, batches)", f"{usual}"
