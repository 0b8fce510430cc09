"""Convert the data passed to ``hk.fit`` to shares, and check that all ranks pass the same data."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from hvdkit import cluster
from hvdkit.cluster.agreement import compare, run_and_describe
from hvdkit.data import GlobalBatches
from hvdkit.data.division import division_of
from hvdkit.data.files.source import FileSource
from hvdkit.data.mixtures import Mixture
from hvdkit.errors import describe, see
from hvdkit.internals import ArrayDataAdapter, DataAdapter, PyDatasetAdapter, context, data_adapters
from hvdkit.keras.array_shares import ArrayShares
from hvdkit.keras.global_batch_shares import GlobalBatchShares
from hvdkit.keras.shares import DataRank, LateAdapter, Shares, first_tensor
from hvdkit.keras.strategies import check_no_scope, undistributed

if TYPE_CHECKING:
    from hvdkit.keras.data_types import Arrays, InputData

DataPair = tuple[Shares, Shares | None]
"""Shares of the data, and of the validation data if there are any."""


@dataclass(frozen=True, kw_only=True)
class FitData:
    """Data in the form that Keras's methods accept.

    Attributes:
        x, y, sample_weight, batch_size, steps, shuffle, class_weight: as for ``model.fit``.
        initial_epoch: initial epoch of training; None for evaluation and prediction.
        argument: the argument name, for error messages.
        is_late: whether batches of Python code, a PyDataset or a generator, may be read only when Keras reads them.
    """

    x: InputData | None
    y: Arrays | None = None
    sample_weight: Arrays | None = None
    batch_size: int | None = None
    steps: int | None = None
    shuffle: bool | str = False
    class_weight: dict[int, float] | None = None
    initial_epoch: int | None = None
    argument: str = "x"
    is_late: bool = False

    def shares(self) -> Shares:
        """Return this rank's shares.

        Raises:
            ValueError: Keras does not accept the data, or the global batch has fewer rows than there are ranks.
        """
        if (x := undistributed(self.x, self.argument)) is not self.x:
            return replace(self, x=x).shares()
        if isinstance(self.x, GlobalBatches):
            return self._global_batch_shares(self.x)
        if isinstance(self.x, FileSource | Mixture):
            remedy = "pass hk.data.GlobalBatches(source, global_batch_size)"
            raise TypeError(describe(self.argument, self.x, "GlobalBatches", remedy))
        data_rank = DataRank.local()
        if self.is_late and isinstance(self.x, (keras.utils.PyDataset, Generator)):
            length = self.x.num_batches if isinstance(self.x, keras.utils.PyDataset) else None
            late = LateAdapter(self._checked_adapter, length)
            return Shares(late, data_rank, may_start_mid_data=self.steps is not None, parts=division_of(self.x))
        inner = self._checked_adapter()
        if isinstance(inner, ArrayDataAdapter):
            _check_rows(inner.batch_size)
            return ArrayShares(inner, data_rank, trains=self.initial_epoch is not None, steps=self.steps)
        parts = division_of(self.x)
        shares = Shares(inner, data_rank, may_start_mid_data=self.steps is not None, parts=parts)
        shares.get_tf_dataset()
        return shares

    def shares_for(self, model: keras.Model, *, has_loss: bool = True) -> Shares:
        """Return this rank's shares, after checking that they fit to ``model``. Raises as :meth:`shares`."""
        shares = self.shares()
        _check_batch_size_of_model(model, shares)
        if has_loss and isinstance(shares, GlobalBatchShares):  # a loss needs labels
            shares.check_labels(model)
        return shares

    def _checked_adapter(self) -> DataAdapter:
        """Return Keras's adapter of the global batches."""
        inner = data_adapters.get_data_adapter(
            x=self.x,
            y=self.y,
            sample_weight=self.sample_weight,
            batch_size=self.batch_size,
            steps_per_epoch=self.steps,
            shuffle=False if isinstance(self.x, tf.data.Dataset) else self.shuffle,  # Keras would warn
            class_weight=self.class_weight,
        )
        if not isinstance(inner, ArrayDataAdapter) and division_of(self.x) is None and cluster.size() > 1:
            spec = inner.get_tf_dataset().element_spec
            first = first_tensor(spec)
            if first is None:
                remedy = "call dataset.batch(batch_size) with the global batch size"
                raise ValueError(describe(self.argument, f"elements {spec}", "batches of rows", remedy))
            if first.shape.rank is not None and first.shape[0] is not None:
                _check_rows(first.shape[0])
        return inner

    def _global_batch_shares(self, batches: GlobalBatches) -> GlobalBatchShares:
        remedies = {
            "y": "make it part of the data: GlobalBatches((x, y), ...)",
            "sample_weight": "make it part of the data: GlobalBatches((x, y, sample_weight), ...)",
            "batch_size": "leave it out: global_batch_size is used",
        }
        for name, remedy in remedies.items():
            if (value := getattr(self, name)) is not None:
                got = f"{value}" if isinstance(value, int) else type(value).__name__
                raise ValueError(describe(name, f"{got}, with GlobalBatches as {self.argument}", "None", remedy))
        return GlobalBatchShares(
            batches,
            DataRank.local(),
            argument=self.argument,
            steps=self.steps,
            class_weight=self.class_weight,
            initial_epoch=self.initial_epoch,
        )


def _check_rows(batch_size: int) -> None:
    ranks = DataRank.local().size
    if batch_size < ranks:
        expected = f"at least one row for each of the {ranks} ranks"
        raise ValueError(describe("batch_size", batch_size, expected, "pass a larger batch_size, which is global"))


def _check_batch_size_of_model(model: keras.Model, shares: Shares) -> None:
    """Raise ValueError if a stateful model, e.g. an RNN, has a fixed batch size that is not that of a rank's rows."""
    size = shares.data_rank.size
    inputs = getattr(model, "inputs", None) or ()
    fixed = next((x.shape[0] for x in inputs if len(x.shape) and x.shape[0] is not None), None)
    if size == 1 or fixed is None or isinstance(shares.inner, LateAdapter):
        return
    if not any(getattr(each, "stateful", False) for each in model._flatten_layers()):
        return
    if isinstance(shares.inner, ArrayDataAdapter):
        rows = shares.inner.batch_size
    else:
        first = first_tensor(shares.inner.get_tf_dataset().element_spec)
        rows = None if first is None else first.shape[0]
    if rows is not None and rows != fixed * size:
        got = f"stateful layers with the fixed batch size {fixed}, and global batches of {rows} rows"
        expected = f"a model for the rows of one of {size} ranks"
        remedy = "build it with batch_size=batch_size // hk.size(), with a batch_size that the number of ranks divides"
        raise ValueError(describe("model", got, expected, remedy))


def prepare_data(call: str, build: Callable[[], DataPair]) -> DataPair:
    """Return the result of ``build``, after comparing it between ranks. An error on one rank raises on all.

    Args:
        call: the user's call, with all arguments that must be equal on all ranks.
        build: returns this rank's shares of the data and of the validation data.

    Raises:
        Exception: ``build`` failed on this rank.
        CollectiveMismatchError: ``build`` failed on another rank, or arguments or data differ between ranks.
    """

    def checked_pair() -> DataPair:
        check_no_scope()
        return build()

    def describe_pair(pair: DataPair) -> _DataDescription:
        return _DataDescription(
            seed=context.global_seed(),
            random_seed=secrets.randbits(31),
            python_state=random.getstate() if any(map(_is_shuffled_by_python, pair)) else None,
            sizes=list(map(_size, pair)),
            digests=[getattr(s, "digest", None) for s in pair],
        )

    built, ranks = run_and_describe(cluster.exchange(), call, checked_pair, describe_pair)
    _compare(ranks)
    seeds = {rank.seed for rank in ranks}
    if len(seeds) > 1 or None in seeds:
        chief_seed = ranks[0].random_seed if ranks[0].seed is None else ranks[0].seed
        for shares in built:
            if isinstance(shares, ArrayShares):
                shares.shuffle_by(chief_seed)
    return built


@dataclass(frozen=True)
class _DataDescription:
    """A rank's description of its data."""

    seed: int | None  # TensorFlow's global seed
    random_seed: int
    python_state: tuple[object, ...] | None  # of Python's random generator, if it orders the batches of a PyDataset
    sizes: list[tuple[object, ...] | None]  # class, number of batches and settings of the training and validation data
    digests: list[object]  # of arrays and of the data of GlobalBatches


def _size(shares: Shares | None) -> tuple[object, ...] | None:
    """Return the class and number of batches, and the settings of GlobalBatches."""
    if shares is None:
        return None
    settings = (shares.settings(),) if isinstance(shares, GlobalBatchShares) else ()
    return type(shares).__name__, shares.num_batches, *settings


def _is_shuffled_by_python(shares: Shares | None) -> bool:
    """Return True for a PyDataset whose batches Keras shuffles with Python's random generator."""
    return shares is not None and isinstance(shares.inner, PyDatasetAdapter) and bool(shares.inner.shuffle)


_UNDIVIDED = (
    "remove what divides the data among ranks, such as x[rank::size] or dataset.shard(size, rank): hk.fit does that"
)
_OTHER_SIZES = f"{_UNDIVIDED}; {see('pitfalls#the-data-is-already-split')}"
_WHOLE_DATA = (
    "seed what draws or shuffles it, by keras.utils.set_random_seed(1), and with NumPy by default_rng(1); or "
    f"{_UNDIVIDED}; {see('pitfalls#a-split-or-shuffle-without-a-seed')}"
)


def _compare(descriptions: list[_DataDescription]) -> None:
    states = "a different state of Python's random", "equal states"
    remedy = "call keras.utils.set_random_seed(seed) on every rank, or pass shuffle=False"
    compare([each.python_state for each in descriptions], "shuffle", remedy, show=lambda *_: states)
    sizes = zip(*(each.sizes for each in descriptions), strict=True)
    for name, ranks in zip(("x", "validation_data"), sizes, strict=True):
        compare(ranks, name, _OTHER_SIZES, show=_show_sizes)
    digests = zip(*(each.digests for each in descriptions), strict=True)
    for name, ranks in zip(("x, y", "validation_data"), digests, strict=True):
        compare(ranks, name, _WHOLE_DATA, show=_show_digests)


def _show_digests(odd: object, usual: object) -> tuple[str, str]:
    """Return descriptions of the digests of arrays, or name what differs in those of GlobalBatches, as JSON."""
    if not (isinstance(odd, str) and isinstance(usual, str)):
        return "other data", "the whole data set"
    first = json.loads(odd)
    second = json.loads(usual)
    return f"other data ({', '.join(name for name in second if first.get(name) != second[name])})", "the same"


def _show_sizes(odd: tuple[object, ...] | None, usual: tuple[object, ...] | None) -> tuple[str, str]:
    """Return the numbers of batches, or what else differs: the kind of data, or the settings of GlobalBatches."""
    if odd is None or usual is None:
        return ("none", "some") if odd is None else ("some", "none")
    if odd[0] == usual[0] and odd[1] != usual[1]:
        return f"{odd[1]} batches", f"{usual[1]}"
    return f"other data {odd}", f"{usual}"
