"""Any number of embedding tables, cut across ranks and looked up in one exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import keras
import numpy as np
import tensorflow as tf

from hvdkit import cluster
from hvdkit.collectives.values import graph_safe
from hvdkit.errors import describe
from hvdkit.gradients.compression import wire_dtype
from hvdkit.layers.base import ShardedLayer
from hvdkit.layers.features import OutOfRange, bag_of
from hvdkit.layers.lookup import Asked, abandon, ask, read
from hvdkit.layers.store import TableStore
from hvdkit.planning import Plan, Table, plan_tables
from hvdkit.planning.table import check_tables


class ShardedEmbeddingCollection(ShardedLayer):
    """Embedding tables whose rows or columns are spread over the ranks: ``{feature: ids}`` to ``{feature: vectors}``.

    A lookup of all features costs one exchange of ids and one of rows for each dtype, and its gradient one more,
    whatever the number of tables; ids are made distinct before they travel. Train with ``hk.DistributedOptimizer``,
    which knows shards by itself. Every rank calls the layer as often, with the same features; batches may differ in
    size, and be empty.

    Ids are dense tensors (with a combiner, their last axis is combined), RaggedTensors or SparseTensors; with a
    combiner a feature may be a pair ``(ids, weights)``.

    Args:
        tables: the tables.
        plan: "auto" (small tables on every rank, all others cut by rows); a :class:`hvdkit.planning.Plan`; or
            placements by hand, ``{"items": "row" | "div" | "column" | "table" | "replicated"}``, the others' being
            chosen.
        seed: of random first values, which depend on it, the table's name and the row, not on the number of ranks.
            None draws one for all ranks.
        compression: "fp16" or "bf16": rows and their gradients travel in 16 bits.
        out_of_range: what becomes of an id that is no row: "error" (on every rank, naming feature, value and table),
            "wrap" (modulo the number of rows), or "drop" (it gives zeros, or nothing to a combiner).
        **kwargs: of ``keras.layers.Layer``.

    Raises:
        ValueError, TypeError: an argument is none of the above; a feature is missing; ids are no integers.
        CollectiveMismatchError: ranks have different tables or placements.

    Example::

        tables = [hk.layers.Table("user", 5_000_000, 32), hk.layers.Table("tags", 10_000, 16, combiner="mean")]
        embed = hk.layers.ShardedEmbeddingCollection(tables, seed=1)
        vectors = embed({"user": users, "tags": tf.ragged.constant([[3, 1], [], [7]])})  # [B, 32] and [B, 16]
    """

    def __init__(
        self,
        tables: Sequence[Table],
        plan: Any = "auto",
        *,
        seed: int | None = None,
        compression: str | None = None,
        out_of_range: OutOfRange = "error",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.tables = check_tables(tables)
        self.compression, self.out_of_range, self.seed = compression, out_of_range, seed
        self._wire = wire_dtype(compression)
        if out_of_range not in get_args(OutOfRange):
            raise ValueError(describe("out_of_range", out_of_range, "'error', 'wrap' or 'drop'", "pass one of them"))
        self.plan = _plan(self.tables, plan)
        self.features = {feature: table for table in self.tables for feature in table.features}
        self._store: TableStore | None = None

    def build(self, input_shape: Any = None) -> None:
        """Make this rank's part of every table."""
        if self._store is not None:
            return
        self._store = TableStore(
            self,
            self.tables,
            self.plan.placements,
            seed=self.seed,
            out_of_range=self.out_of_range,
            wire=self._wire,
        )
        self.built = True

    @graph_safe
    def call(self, inputs: Mapping[str, Any] | Asked, training: bool | None = None) -> dict[str, Any]:
        """Look the features up.

        Args:
            inputs: every feature's ids, or ids and weights; or what :meth:`ask` returned.
            training: True, as in ``fit``: new ids of tables that evict get rows. Else they give zeros; and where
                nobody said False either, a gradient of such a table is a LookupError.

        Returns:
            Of each feature ``[..., output_dim]`` in the layer's compute dtype.
        """
        if isinstance(inputs, Asked):
            self._check_features(inputs.bags)
        asked = inputs if isinstance(inputs, Asked) else self.ask(inputs)
        found = read(self._tables_here(), asked, training)
        return {name: tf.cast(vectors, self.compute_dtype) for name, vectors in found.items()}

    @graph_safe
    def ask(self, inputs: Mapping[str, Any]) -> Asked:
        """Tell the ranks which rows the next call needs, ahead of it: ids travel while something else is computed.

        Every rank calls it. What it returns goes to the layer in place of ids, once, in the same step or a later one.
        Rows are read then, so that results are the same.

        Args:
            inputs: as for a call.

        Example::

            @tf.function
            def step(asked, labels, next_ids):
                following = embed.ask(next_ids)  # on its way while this step computes
                with tf.GradientTape() as tape:
                    loss = loss_of(model(embed(asked, training=True)), labels)
                ...
                return following, loss
        """
        store = self._tables_here()
        try:
            self._check_features(inputs)
            bags = {name: bag_of(inputs[name], table.combiner, name) for name, table in self.features.items()}
        except (TypeError, ValueError):
            if tf.executing_eagerly():  # a graph that cannot be traced ends the job; here others would wait
                abandon(store)
            raise
        return ask(store, bags)

    def compute_output_spec(self, inputs: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """Return the outputs' shapes, without a lookup."""
        self._check_features(inputs)
        return {name: output_spec(inputs[name], table, self.compute_dtype) for name, table in self.features.items()}

    def gather(self, table: str, root: int | None = None) -> np.ndarray | None:
        """Return a whole table ``[input_dim, output_dim]``: on every rank, or on ``root`` and None elsewhere.

        Every rank calls it. Raises ValueError if there is no such table or rank.
        """
        return self._tables_here().gather(table, root)

    def ids(self, table: str) -> np.ndarray:
        """Return the id of each row of a table that evicts, ``[input_dim]`` int64, -2**63 for free rows.

        Every rank calls it. Raises ValueError if the table is none that evicts.
        """
        return self._tables_here().ids(table)

    def assign(self, table: str, full_array: Any) -> None:
        """Set a whole table from ``[input_dim, output_dim]``; each rank takes its part, and exchanges nothing."""
        self._tables_here().assign(table, full_array)

    def _tables_here(self) -> TableStore:
        if self._store is None:
            self.build()
        assert self._store is not None
        return self._store

    def _check_features(self, inputs: Any) -> None:
        if not isinstance(inputs, Mapping) or set(inputs) != set(self.features):
            got = sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
            remedy = "pass every feature, and no other"
            raise ValueError(describe("inputs", got, f"a dict of {sorted(self.features)}", remedy))

    def get_config(self) -> dict[str, Any]:
        """Return what :meth:`from_config` makes an equal layer of."""
        tables = [{**vars(t), "initializer": _initializer_config(t.initializer)} for t in self.tables]
        own = {"seed": self.seed, "compression": self.compression, "out_of_range": self.out_of_range}
        return {**super().get_config(), "tables": tables, "plan": dict(self.plan.placements), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ShardedEmbeddingCollection:
        """Make a layer from :meth:`get_config`'s result."""
        tables = [Table(**{**t, "features": tuple(t["features"])}) for t in config["tables"]]
        return cls(**{**config, "tables": tables})


def _initializer_config(initializer: Any) -> Any:
    if isinstance(initializer, keras.initializers.Initializer):
        return keras.initializers.serialize(initializer)
    return initializer


def output_spec(inputs: Any, table: Table, dtype: str) -> keras.KerasTensor:
    """Return the shape and dtype of one feature's vectors."""
    ids = inputs[0] if isinstance(inputs, tuple | list) else inputs
    if not ids.dtype.startswith(("int", "uint")) if isinstance(ids.dtype, str) else not ids.dtype.is_integer:
        raise TypeError(describe("ids", f"dtype {ids.dtype}", "integers", "give the Input dtype='int64'"))
    shape = tuple(ids.shape)
    if table.combiner is not None and len(shape) > 1:
        shape = shape[:-1]
    ragged = bool(getattr(ids, "ragged", False)) and table.combiner is None
    extra = {"ragged": True} if ragged else {}
    return keras.KerasTensor((*shape, table.output_dim), dtype=dtype, **extra)


def _plan(tables: tuple[Table, ...], plan: Any) -> Plan:
    if isinstance(plan, Plan):
        if plan.size != cluster.size() or plan.tables != tables:
            got = f"one of {len(plan.tables)} tables for {plan.size} ranks"
            remedy = "call hk.plan_tables(tables, hk.size())"
            raise ValueError(describe("plan", got, f"one of these tables for {cluster.size()} ranks", remedy))
        return plan
    if plan != "auto" and not isinstance(plan, Mapping):
        raise TypeError(describe("plan", plan, "'auto', a Plan or a dict of placements", "pass {'table': 'row'}"))
    return plan_tables(tables, cluster.size(), placements=None if plan == "auto" else plan)
