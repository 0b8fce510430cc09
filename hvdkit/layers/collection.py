"""A collection of embedding tables, sharded across ranks and looked up in one exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.call_checks import exchange_payloads
from hvdkit.collectives.conversion import graph_safe
from hvdkit.errors import describe
from hvdkit.layers.features import (
    Bag,
    FeatureInput,
    Features,
    Nested,
    OutOfRange,
    Vectors,
    bag_of,
    check_exact,
    flatten_features,
    lookups_of,
    nest_outputs,
    unflatten_features,
)
from hvdkit.layers.lookup import PendingLookup, abandon_lookup, read_outputs, send_requests
from hvdkit.layers.sharded_layer import ShardedLayer
from hvdkit.layers.table_store import TableStore
from hvdkit.optimizer.compression import wire_dtype
from hvdkit.sharding.plan import Plan, plan_tables
from hvdkit.sharding.table import Table, check_tables

Mask: TypeAlias = "tf.Tensor | tf.RaggedTensor | None"
"""False for padding."""
SymbolicInput: TypeAlias = "keras.KerasTensor | tuple[keras.KerasTensor, keras.KerasTensor]"
"""Ids of one feature, or ids and weights, in a functional model."""
T = TypeVar("T")


@keras.saving.register_keras_serializable("hvdkit")
class ShardedEmbeddingCollection(ShardedLayer):
    """Embedding tables sharded by rows or columns: maps ``{feature: ids}`` to ``{feature: vectors}``.

    A lookup of all features costs one exchange of ids and one of rows per dtype, and its gradient one more, regardless
    of the number of tables; ids are deduplicated before they are sent. Train with ``hk.DistributedOptimizer``, which
    handles shards automatically. Every rank calls the layer the same number of times, with the same features; batches
    may differ in size, and be empty.

    Ids are dense tensors (with a combiner, their last axis is combined), RaggedTensors or SparseTensors; with a
    combiner a feature may be a pair ``(ids, weights)``. Features may be in nested dicts: ``{"user": {"clicks": ids}}``
    is feature ``"user/clicks"``; outputs have the same nesting. A feature in several tables has an output for each of
    them, ``"feature@table"``.

    Args:
        tables: the tables.
        plan: "auto" (small tables replicated, all others sharded by rows); the result of ``hk.plan_tables``; or
            explicit placements, ``{"items": "row" | "div" | "column" | "table" | "replicated"}``; the placements of
            other tables are chosen automatically.
        seed: seed of random initial values, which depend on the seed, the table's name and the row, but not on the
            number of ranks. None draws one seed for all ranks.
        compression: "fp16" or "bf16": send rows and their gradients in 16 bits.
        out_of_range: how to handle ids out of range: "error" (on every rank, naming feature, value and table), "wrap"
            (modulo the number of rows), or "drop" (zeros, or skipped by a combiner).
        **kwargs: arguments of ``keras.layers.Layer``.

    Attributes:
        features: the names of all features.

    Raises:
        ValueError, TypeError: an argument is invalid; a feature is missing; ids are not integers.
        CollectiveMismatchError: ranks have different tables or placements.

    Examples:
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> tables = [hk.layers.Table("user", 50_000, 32), hk.layers.Table("tags", 1000, 16, combiner="mean")]
        >>> embed = hk.layers.ShardedEmbeddingCollection(tables, seed=1)
        >>> vectors = embed({"user": tf.constant([4, 7, 4]), "tags": tf.ragged.constant([[3, 1], [], [7]])})
        >>> vectors["user"].shape, vectors["tags"].shape
        (TensorShape([3, 32]), TensorShape([3, 16]))
        >>> embed.gather("user").shape  # the entire table
        (50000, 32)
    """

    _floats = False  # whether ids may be floats

    def __init__(
        self,
        tables: Sequence[Table],
        plan: Plan | Mapping[str, str] | Literal["auto"] = "auto",
        *,
        seed: int | None = None,
        compression: str | None = None,
        out_of_range: OutOfRange = "error",
        **kwargs: Any,
    ):
        if kwargs.pop("dp_input", True) is not True:  # removed; configs saved before contain True or False
            remedy = "leave it out, and pass the ids of each rank's own examples, for all features"
            raise ValueError(describe("dp_input", False, "True: ids for tables of this rank are not supported", remedy))
        super().__init__(**kwargs)
        self.autocast = False  # ids are integers, and weights keep their dtype
        self.tables = check_tables(tables)
        self.compression = compression
        self.out_of_range = out_of_range
        self.seed = seed
        self._wire = wire_dtype(compression)
        if out_of_range not in get_args(OutOfRange):
            raise ValueError(describe("out_of_range", out_of_range, "'error', 'wrap' or 'drop'", "pass one of them"))
        self.plan = _plan(self.tables, plan)
        self.lookups = lookups_of(self.tables)
        self.features = tuple(dict.fromkeys(feature for feature, _ in self.lookups.values()))
        self.supports_masking = any(table.mask_zero and table.combiner is None for table in self.tables)
        self._store: TableStore | None = None

    def build(self, input_shape: object = None) -> None:
        """Create this rank's part of every table."""
        if self._store is not None:
            return
        self._store = TableStore(
            self,
            self.tables,
            self.plan.placements,
            seed=self.seed,
            out_of_range=self.out_of_range,
            wire=self._wire,
            floats=self._floats,
        )
        self.built = True

    @graph_safe
    def call(
        self, inputs: Features | PendingLookup, training: bool | None = None
    ) -> dict[str, Vectors | Nested[Vectors]]:
        """Look up the vectors of all features.

        Args:
            inputs: every feature's ids, or ids and weights, optionally in nested dicts; or the result of ``ask``.
            training: True, as in ``fit``: new ids in tables with eviction are assigned rows, unless the layer is frozen
                (``trainable = False``). Otherwise they give zeros; with None, a gradient of such a table raises a
                LookupError.

        Returns:
            ``[..., output_dim]`` for each feature, in the layer's compute dtype and with the nesting of ``inputs``.
        """
        store = self._built_store()
        pending = inputs if isinstance(inputs, PendingLookup) else self.ask(inputs)
        bags = flatten_features(pending.bags)
        if set(bags) != set(self.lookups):
            remedy = "pass the result of this layer's ask()"
            raise ValueError(describe("inputs", sorted(bags), f"a request for {sorted(self.lookups)}", remedy))
        outputs = read_outputs(store, bags, pending.rows, training)
        # Keras adds the regularization of replicated tables.
        if not self._losses and (penalty := store.penalty()) is not None:  # once per step
            self.add_loss(penalty)
        outputs = {name: tf.cast(rows, self.compute_dtype) for name, rows in outputs.items()}
        return unflatten_features(pending.bags, outputs)

    @graph_safe
    def ask(self, inputs: Features) -> PendingLookup:
        """Request the rows of the next call in advance, to overlap the exchange of ids with computation.

        Every rank calls it. Pass the result to the layer instead of ids, once, in the same step or a later one. Rows
        are read in that call, so the results are the same.

        Args:
            inputs: as for a call.

        Returns:
            The request, to pass to the layer; also from one call of a ``tf.function`` to the next.

        Examples:
            >>> import tensorflow as tf
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> embed = hk.layers.ShardedEmbeddingCollection([hk.layers.Table("user", 1000, 8)])
            >>> @tf.function
            ... def step(pending, next_ids):
            ...     next_pending = embed.ask(next_ids)  # exchanged while this step computes
            ...     vectors = embed(pending, training=True)["user"]
            ...     return next_pending, tf.reduce_sum(vectors)
            >>> pending = embed.ask({"user": tf.constant([0, 1])})
            >>> for batch in ([2, 3], [4, 5]):
            ...     pending, loss = step(pending, {"user": tf.constant(batch)})
        """
        pending = send_requests(self._built_store(), self._bags(inputs))
        return PendingLookup(nest_outputs(inputs, pending.bags, self.lookups), pending.rows)

    def _bags(self, inputs: Features) -> dict[str, Bag]:
        """Return each output's ids; on invalid inputs, notify the other ranks so that they do not wait."""
        try:
            values = self._check_features(inputs)
            return {
                name: bag_of(values[feature], table, feature, floats=self._floats, how=self.out_of_range)
                for name, (feature, table) in self.lookups.items()
            }
        except Exception:
            if tf.executing_eagerly():  # in a graph, a tracing error ends the job; here the other ranks would wait
                abandon_lookup(self._built_store())
            raise

    def compute_output_spec(
        self, inputs: Nested[SymbolicInput], **_: object
    ) -> dict[str, keras.KerasTensor | Nested[keras.KerasTensor]]:
        """Return the outputs' shapes, without a lookup."""
        values = self._check_features(inputs)
        specs = {
            name: self._output_spec(values[feature], table, feature) for name, (feature, table) in self.lookups.items()
        }
        return nest_outputs(inputs, specs, self.lookups)

    def _output_spec(self, inputs: SymbolicInput, table: Table, feature: str) -> keras.KerasTensor:
        """Return the shape and dtype of one feature's vectors; raise TypeError for ids of an invalid dtype."""
        ids = inputs[0] if isinstance(inputs, tuple | list) else inputs
        ids_dtype = tf.as_dtype(ids.dtype)
        if self._floats and ids_dtype.is_floating:
            check_exact(ids_dtype, table, self.out_of_range, feature)
        elif not ids_dtype.is_integer:
            got = f"dtype {ids_dtype.name}"
            raise TypeError(describe(f"ids of {feature!r}", got, "integers", "give the Input dtype='int64'"))
        shape = tuple(ids.shape)
        axes = len(shape)
        if table.combiner is not None and axes > 1:
            shape = shape[:-1]
        ragged = bool(getattr(ids, "ragged", False)) and (table.combiner is None or axes > 2)
        extra = {"ragged": True} if ragged else {}
        return keras.KerasTensor((*shape, table.output_dim), dtype=self.compute_dtype, **extra)

    def compute_mask(
        self, inputs: Features | PendingLookup, previous_mask: object = None
    ) -> dict[str, Mask | Nested[Mask]] | None:
        """Return a mask for each output, False for padding; None without ``mask_zero`` or with a combiner."""
        if not self.supports_masking:
            return None
        if isinstance(inputs, PendingLookup):
            bags = flatten_features(inputs.bags)
            return unflatten_features(inputs.bags, {name: bag.mask for name, bag in bags.items()})
        values = flatten_features(inputs)
        masks = {name: _mask(values[feature], table) for name, (feature, table) in self.lookups.items()}
        return nest_outputs(inputs, masks, self.lookups)

    def gather(self, table: str, root: int | None = None) -> np.ndarray | None:
        """Return an entire table on every rank, or only on ``root``. Every rank calls it.

        Args:
            table: the table's name.
            root: the rank that gets the table; None for all.

        Returns:
            ``[input_dim, output_dim]``; None on ranks other than ``root``.

        Raises:
            ValueError: the table or rank does not exist.
        """
        return self._built_store().gather(table, root)

    def ids(self, table: str) -> np.ndarray:
        """Return the id of each row of a table with eviction. Every rank calls it.

        Args:
            table: the table's name.

        Returns:
            ``[input_dim]`` int64, -2**63 for free rows.

        Raises:
            ValueError: the table does not exist or does not evict.

        Examples:
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> embed = hk.layers.ShardedEmbeddingCollection([hk.layers.Table("words", 64, 8, evict="lru")])
            >>> vectors = embed({"words": np.array([-5, 10**12])}, training=True)  # any integers; new ones get a row
            >>> sorted(embed.ids("words").tolist())[-2:]
            [-5, 1000000000000]
        """
        return self._built_store().ids(table)

    def assign(self, table: str, full_array: npt.ArrayLike) -> None:
        """Set an entire table; each rank takes its part, without communication.

        Args:
            table: the table's name.
            full_array: ``[input_dim, output_dim]``, the same on every rank.

        Raises:
            ValueError: the table does not exist, or the array has the wrong shape.

        Examples:
            >>> import numpy as np
            >>> import hvdkit as hk
            >>> cluster = hk.init()
            >>> embed = hk.layers.ShardedEmbeddingCollection([hk.layers.Table("user", 10, 2)])
            >>> embed.assign("user", np.arange(20).reshape(10, 2))
            >>> embed({"user": np.array([9])})["user"].numpy()
            array([[18., 19.]], dtype=float32)
        """
        self._built_store().assign(table, full_array)

    def get_weights(self) -> list[np.ndarray]:
        """Return the unsharded tables ``[input_dim, output_dim]``, in the order of ``tables``. Every rank calls it.

        For a table that does not fit into a rank's memory use ``hk.checkpoint.save`` and ``hk.checkpoint.export_npy``,
        which needs a few MiB. ``model.get_weights()`` does not call this method: it returns the rank's parts.

        Raises:
            ValueError: a table has eviction; its rows are meaningless without their ids.
        """
        self._check_no_evict("get_weights")
        return [cast("np.ndarray", self.gather(table.name)) for table in self.tables]

    def set_weights(self, weights: Sequence[npt.ArrayLike]) -> None:
        """Set all tables from unsharded arrays, the same on every rank; each rank keeps its part. Every rank calls it.

        Args:
            weights: ``[input_dim, output_dim]`` each, in the order of ``tables``. From a file mapped with
                ``numpy.load(path, mmap_mode="r")``, a rank reads only its part.

        Raises:
            ValueError: a table has eviction; or the number or shapes of this rank's arrays are wrong.
            CollectiveMismatchError: another rank's arrays are wrong.
        """
        self._check_no_evict("set_weights")
        store = self._built_store()
        names = [table.name for table in self.tables]

        def check() -> None:
            if len(weights) != len(names):
                remedy = "pass one array for each table"
                raise ValueError(describe("weights", f"{len(weights)} arrays", f"{len(names)}, of {names}", remedy))
            for name, array in zip(names, weights, strict=True):
                store.check_whole(name, array)

        exchange_payloads(f"set_weights() of tables {names}", check)
        for name, array in zip(names, weights, strict=True):
            store.assign(name, array)

    def _check_no_evict(self, method: str) -> None:
        evicting = [table.name for table in self.tables if table.evict]
        if evicting:
            remedy = "save with hk.checkpoint.save; gather() and ids() show rows and ids"
            raise ValueError(describe(method, f"table {evicting[0]!r} with evict", "tables without", remedy))

    def _built_store(self) -> TableStore:
        if self._store is None:
            self.build()
        assert self._store is not None
        self._store.register_created()
        return self._store

    def _check_features(self, inputs: Nested[T]) -> dict[str, T]:
        """Return the inputs by feature."""
        values = flatten_features(inputs) if isinstance(inputs, Mapping) else None
        if values is None or set(values) != set(self.features):
            got = sorted(values) if values is not None else type(inputs).__name__
            remedy = "pass every feature, and no other"
            raise ValueError(describe("inputs", got, f"a dict of {sorted(self.features)}", remedy))
        return values

    def get_config(self) -> dict[str, object]:
        """Return the layer's config for ``from_config``."""
        tables = [table_config(table) for table in self.tables]
        options = {name: getattr(self, name) for name in ("seed", "compression", "out_of_range")}
        return {**super().get_config(), "tables": tables, "plan": dict(self.plan.placements), **options}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ShardedEmbeddingCollection:
        """Create a layer from the result of ``get_config``."""
        return cls(**{**config, "tables": [table_of(table) for table in config["tables"]]})


def table_config(table: Table) -> dict[str, object]:
    """Return a table's config for :func:`table_of`. Its values are plain, except for arrays of initial values."""
    config = {field.name: getattr(table, field.name) for field in dataclasses.fields(table) if field.init}
    config["features"] = list(table.features)
    if isinstance(table.initializer, keras.initializers.Initializer):
        config["initializer"] = keras.initializers.serialize(table.initializer)
    if table.optimizer is not None:
        config["optimizer"] = keras.optimizers.serialize(table.optimizer)
    if table.regularizer is not None:
        config["regularizer"] = keras.regularizers.serialize(table.regularizer)
    return config


def table_of(config: Mapping[str, object]) -> Table:
    """Create a table from the result of :func:`table_config`."""
    arguments = deserialize(config, ("initializer", "optimizer", "regularizer"))
    return Table(**{**arguments, "features": tuple(arguments["features"])})


def deserialize(config: Mapping[str, object], names: Sequence[str]) -> dict[str, Any]:
    """Return ``config`` with the objects under ``names`` deserialized."""
    configs = {name: config[name] for name in names if isinstance(config.get(name), Mapping)}
    return {**config, **{name: keras.saving.deserialize_keras_object(value) for name, value in configs.items()}}


def _mask(inputs: FeatureInput, table: Table) -> Mask:
    """Return a mask that is False for padding; None without ``mask_zero`` or with a combiner."""
    if not table.mask_zero or table.combiner is not None:
        return None
    return keras.ops.not_equal(inputs, 0) if isinstance(inputs, keras.KerasTensor) else tf.not_equal(inputs, 0)


def _plan(tables: tuple[Table, ...], plan: Plan | Mapping[str, str] | Literal["auto"]) -> Plan:
    if isinstance(plan, Plan):
        if plan.size != cluster.size() or plan.tables != tables:
            got = f"one of {len(plan.tables)} tables for {plan.size} ranks"
            remedy = "call hk.plan_tables(tables, hk.size())"
            raise ValueError(describe("plan", got, f"one of these tables for {cluster.size()} ranks", remedy))
        return plan
    if plan != "auto" and not isinstance(plan, Mapping):
        raise TypeError(describe("plan", plan, "'auto', a Plan or a dict of placements", "pass {'table': 'row'}"))
    return plan_tables(tables, cluster.size(), placements=plan if isinstance(plan, Mapping) else None)
