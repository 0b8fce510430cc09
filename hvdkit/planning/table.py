"""What a person says of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from hvdkit.arguments import integer
from hvdkit.errors import describe

Placement = Literal["row", "div", "column", "table", "replicated"]
PLACEMENTS: tuple[str, ...] = get_args(Placement)
Combiner = Literal["sum", "mean", "sqrtn"]
Evict = Literal["lru", "lfu"]
# Rows among which an id of a table that evicts can stand.
BUCKET = 32
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Table:
    """One embedding table.

    Attributes:
        name: unique in its collection; also the name of its feature, unless ``features`` says otherwise.
        input_dim: number of rows, >= 1.
        output_dim: numbers in a row, >= 1.
        combiner: how an example's rows become one: "sum", "mean" (by the sum of weights), "sqrtn" (by the root of the
            sum of squared weights); None keeps them apart.
        features: names of the features that look rows up in it.
        initializer: as for ``hk.PartitionedVariable``.
        dtype: "float32", "float64", "float16" or "bfloat16".
        evict: None: ids are rows, 0 to ``input_dim - 1``. "lru" or "lfu": ids are any 64-bit integers, such as hashes
            of names, of which ``input_dim`` (rounded up to a multiple of 32) have a row at a time. A new id gets a free
            row; where there is none, the row of the id that was asked for least recently, or in the fewest steps.
        host: keep the table and its slots in the host's memory where the rank has a GPU; rows travel as they are
            asked for.

    Raises:
        TypeError, ValueError: an attribute is none of the above.

    Example::

        hk.layers.Table("items", 1_000_000, 64, combiner="mean", features=("viewed", "bought"))
    """

    name: str
    input_dim: int
    output_dim: int
    combiner: Combiner | None = None
    features: tuple[str, ...] = ()
    initializer: Any = "uniform"
    dtype: str = "float32"
    evict: Evict | None = None
    host: bool = False

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
        if self.dtype not in DTYPES:
            raise ValueError(describe(f"dtype {where}", self.dtype, f"one of {sorted(DTYPES)}", "pass 'float32'"))
        if self.evict not in (None, *get_args(Evict)):
            raise ValueError(describe(f"evict {where}", self.evict, "None, 'lru' or 'lfu'", "pass one of them"))
        if self.evict is not None:
            object.__setattr__(self, "input_dim", self.buckets * BUCKET)

    @property
    def buckets(self) -> int:
        """Number of buckets of a table that evicts."""
        return -(-self.input_dim // BUCKET)

    @property
    def bytes(self) -> int:
        """Bytes of the whole table."""
        return self.input_dim * self.output_dim * DTYPES[self.dtype]


def check_tables(tables: Any) -> tuple[Table, ...]:
    """Return ``tables`` as a tuple after checking that names and features are unique.

    Raises:
        TypeError: an element is no Table.
        ValueError: there is none, or a name or feature is there twice.
    """
    if isinstance(tables, Table):
        raise TypeError(describe("tables", "a single Table", "a list of them", "pass [table]"))
    listed = tuple(tables)
    if not listed:
        raise ValueError(describe("tables", "none", "at least one Table", "pass [hk.layers.Table(...), ...]"))
    for table in listed:
        if not isinstance(table, Table):
            raise TypeError(describe("tables", type(table).__name__, "hk.layers.Table", "make one of each"))
    for what, names in (("name", [t.name for t in listed]), ("feature", [f for t in listed for f in t.features])):
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(
                describe("tables", f"{what} {twice[0]!r} twice", f"each {what} once",
                         "one table for several features is Table(..., features=('a', 'b'))")
            )  # fmt: skip
    return listed
