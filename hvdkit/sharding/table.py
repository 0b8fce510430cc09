"""The user's description of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from hvdkit.errors import describe, integer
from hvdkit.sharding.optimizer_configs import config_of

if TYPE_CHECKING:
    import keras
    import numpy.typing as npt

Placement = Literal["row", "div", "column", "table", "replicated"]
PLACEMENTS: tuple[str, ...] = get_args(Placement)
Combiner = Literal["sum", "mean", "sqrtn"]
Evict = Literal["lru", "lfu"]
Initializer: TypeAlias = "keras.initializers.Initializer | str | float | npt.ArrayLike"
"""An initializer of Keras or its name, a number, or the entire array."""
# Rows per bucket: the rows that an id may occupy in a table with eviction.
BUCKET = 32
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Table:
    """One embedding table.

    Attributes:
        name: unique in its collection; also the default name of its feature.
        input_dim: number of rows, >= 1.
        output_dim: number of columns, >= 1.
        combiner: how to combine an example's rows: "sum", "mean" (divide by the sum of weights), "sqrtn" (divide by the
            root of the sum of squared weights); None returns all rows.
        features: names of the features that are looked up in it. A feature may be in several tables; a name such as
            ``"user/clicks"`` refers to a nested input, ``{"user": {"clicks": ids}}``.
        initializer: as for ``hk.PartitionedVariable``.
        dtype: "float32", "float64", "float16" or "bfloat16".
        evict: None: ids are rows, 0 to ``input_dim - 1``. "lru" or "lfu": ids are any 64-bit integers, such as hashes
            of names, of which ``input_dim`` (rounded up to a multiple of 32) have a row at a time. A new id gets a free
            row, or evicts the id that was requested least recently ("lru") or in the fewest steps ("lfu"). With as many
            ids as rows about 7 % of the ids evict each other, with half as many almost none: choose ``input_dim`` twice
            the number of ids to keep.
        host: keep the table and its slots in host memory if the rank has a GPU; only requested rows are transferred.
        optimizer: a Keras optimizer, or its name, that updates this table instead of the model's optimizer, with its
            own learning rate. Requires ``hk.DistributedOptimizer``. None: the model's optimizer.
        regularizer: a penalty on the entire table, which the layer adds to its losses: ``L1``, ``L2`` or ``L1L2`` of
            ``keras.regularizers``, or a name.
        mask_zero: id 0 is padding: a combiner skips it, and without a combiner the output has a Keras mask.
        optimizer_key: class and configuration of ``optimizer``, set automatically; "" without one.

    Raises:
        TypeError, ValueError: an attribute is invalid.

    Examples:
        >>> import keras
        >>> import hvdkit as hk
        >>> items = hk.layers.Table("items", 1_000_000, 64, combiner="mean", features=("viewed", "bought"))
        >>> items.bytes
        256000000
        >>> users = hk.layers.Table("users", 5_000_000, 32, optimizer=keras.optimizers.Adagrad(0.05))
        >>> users.features
        ('users',)
        >>> hashed = hk.layers.Table("words", 100, 16, evict="lru")
        >>> hashed.buckets, hashed.input_dim  # rounded up to 32 rows per bucket
        (4, 128)
    """

    name: str
    input_dim: int
    output_dim: int
    combiner: Combiner | None = None
    features: tuple[str, ...] = ()
    initializer: Initializer = "uniform"
    dtype: str = "float32"
    evict: Evict | None = None
    host: bool = False
    optimizer: keras.optimizers.Optimizer | None = field(default=None, compare=False)
    regularizer: keras.regularizers.Regularizer | None = field(default=None, compare=False)
    mask_zero: bool = False
    optimizer_key: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            raise ValueError(describe("name", self.name, "a word without /", "name the table, e.g. 'items'"))
        where = f"of table {self.name!r}"
        object.__setattr__(self, "input_dim", integer(f"input_dim {where}", self.input_dim, minimum=1))
        object.__setattr__(self, "output_dim", integer(f"output_dim {where}", self.output_dim, minimum=1))
        if self.combiner not in (None, *get_args(Combiner)):
            raise ValueError(
                describe(f"combiner {where}", self.combiner, "None, 'sum', 'mean' or 'sqrtn'", "pass one of them")
            )
        if isinstance(self.features, str):
            raise TypeError(describe(f"features {where}", self.features, "a tuple of names", "pass ('name',)"))
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))
        if len(set(self.features)) < len(self.features):
            raise ValueError(describe(f"features {where}", list(self.features), "each feature once", "leave one out"))
        if self.dtype not in DTYPES:
            raise ValueError(describe(f"dtype {where}", self.dtype, f"one of {sorted(DTYPES)}", "pass 'float32'"))
        if self.evict not in (None, *get_args(Evict)):
            raise ValueError(describe(f"evict {where}", self.evict, "None, 'lru' or 'lfu'", "pass one of them"))
        if self.evict is not None:
            object.__setattr__(self, "input_dim", self.buckets * BUCKET)
        if self.optimizer is not None:
            object.__setattr__(self, "optimizer", _optimizer(self.optimizer, where))
            object.__setattr__(self, "optimizer_key", _optimizer_key(self.optimizer))
        if self.regularizer is not None:
            object.__setattr__(self, "regularizer", _regularizer(self.regularizer, where))
            if self.evict is not None:
                remedy = "regularize other tables: rows without an id have no meaning"
                raise ValueError(describe(f"regularizer {where}", self.regularizer, "None with evict", remedy))

    @property
    def buckets(self) -> int:
        """Number of buckets of a table with eviction."""
        return -(-self.input_dim // BUCKET)

    @property
    def bytes(self) -> int:
        """Bytes of the unsharded table."""
        return self.input_dim * self.output_dim * DTYPES[self.dtype]


def _optimizer(value: object, where: str) -> keras.optimizers.Optimizer:
    """Return the Keras optimizer of a table, or raise TypeError."""
    import keras

    try:
        resolved = keras.optimizers.get(value)
    except (TypeError, ValueError):
        resolved = value
    names = ("LossScaleOptimizer", "MultiOptimizer")
    wrappers = tuple(getattr(keras.optimizers, name) for name in names if hasattr(keras.optimizers, name))
    is_wrapped = isinstance(resolved, wrappers) or hasattr(resolved, "_hvdkit")
    if is_wrapped or not isinstance(resolved, keras.optimizers.Optimizer):
        expected = "a plain Keras optimizer or its name"
        remedy = "pass e.g. keras.optimizers.Adagrad(0.05), without a wrapper"
        raise TypeError(describe(f"optimizer {where}", value, expected, remedy))
    return resolved


def _optimizer_key(optimizer: keras.optimizers.Optimizer) -> str:
    """Return a key that is equal for equal optimizers on all ranks: class and configuration."""
    config = {name: value for name, value in config_of(optimizer).items() if name != "name"}
    values = {name: getattr(value, "__qualname__", value) for name, value in config.items()}
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value}' for name, value in sorted(values.items()))})"


def _regularizer(value: object, where: str) -> keras.regularizers.Regularizer:
    """Return the Keras regularizer; raise ValueError unless it is a sum over elements, which ranks can add up."""
    import keras

    kinds = keras.regularizers
    try:
        resolved = kinds.get(value)
    except (TypeError, ValueError):
        resolved = value
    if type(resolved) not in (kinds.L1, kinds.L2, kinds.L1L2):
        expected = "keras.regularizers.L1, L2 or L1L2, which are sums over all numbers"
        remedy = "compute any other penalty from the layer's outputs, and add it to the loss"
        raise ValueError(describe(f"regularizer {where}", value, expected, remedy))
    return resolved


def check_tables(tables: Sequence[Table]) -> tuple[Table, ...]:
    """Return ``tables`` as a tuple after checking that names are unique.

    Raises:
        TypeError: an element is not a Table.
        ValueError: ``tables`` is empty, or a name occurs twice.
    """
    if isinstance(tables, Table):
        raise TypeError(describe("tables", "a single Table", "a list of them", "pass [table]"))
    listed = tuple(tables)
    if not listed:
        raise ValueError(describe("tables", "none", "at least one Table", "pass [hk.layers.Table(...), ...]"))
    for table in listed:
        if not isinstance(table, Table):
            raise TypeError(describe("tables", type(table).__name__, "hk.layers.Table", "pass hk.layers.Table objects"))
    names = [table.name for table in listed]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        remedy = "one table for several features is Table(..., features=('a', 'b'))"
        raise ValueError(describe("tables", f"name {twice[0]!r} twice", "each name once", remedy))
    return listed
