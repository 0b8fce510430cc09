"""The errors that hvdkit raises.

Invalid arguments raise ``ValueError`` or ``TypeError``. Errors of the job as a whole derive from :class:`HvdkitError`,
so that user scripts can catch them in one place.

Every message contains the argument, the actual value, the expected value and the remedy; if ranks differ, it names the
rank. :func:`describe` formats such a message; :func:`see` names a page of the documentation; :func:`integer`
checks an argument. Text from files in messages is written with escapes (:func:`printable`).
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING


class HvdkitError(RuntimeError):
    """Base class of errors that concern the job rather than an argument.

    Attributes:
        exit_code: the exit code of a rank that does not catch the error.
        page: the page of the documentation about such errors, ``PAGE`` or ``PAGE#SECTION``. A report of an uncaught
            error ends with it.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> try:
        ...     hk.checkpoint.restore("runs/no-such-run", {"step": 0})
        ... except hk.HvdkitError as error:
        ...     print(type(error).__name__, error.exit_code)
        CheckpointError 1
    """

    exit_code: int = 1
    page: str | None = None

    # AutoGraph recreates errors that leave a ``tf.function``. It only keeps the class if the constructor is that of
    # Exception; otherwise it raises a StagingError, which callers cannot catch by name.
    if not TYPE_CHECKING:  # an assigned constructor would make every error Any
        __init__ = Exception.__init__

    # Characters that are not escaped: errors may quote other errors, which may have several lines.
    _kept = "\n\t"

    def __str__(self) -> str:
        """Return the message; each argument is a line. Text from files in it cannot send commands to a terminal."""
        return "\n".join(printable(line, keep=self._kept) for line in self.args)


class ClusterError(HvdkitError):
    """The ranks are not set up as the launcher or the caller requested.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> hk.init(mesh={"model": hk.size()})
        Traceback (most recent call last):
            ...
        hvdkit.errors.ClusterError: mesh: got {'model': ...}, expected {'data': ...}, as in the first hk.init(); ...
    """

    page = "launching"


class CollectiveMismatchError(HvdkitError):
    """Ranks called different collectives, or the same collective with incompatible tensors.

    Every rank that takes part raises it, and the message names the ranks that differ.

    Examples:
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> try:
        ...     total = hk.allreduce(np.zeros(hk.rank() + 1), hk.Sum)  # another shape on each rank
        ...     fits = True
        ... except hk.CollectiveMismatchError:
        ...     fits = False
        >>> fits == (hk.size() == 1)
        True
    """

    page = "collectives#errors"


class CheckpointError(HvdkitError):
    """A checkpoint cannot be written, found or restored.

    Examples:
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> try:
        ...     hk.checkpoint.restore("runs/no-such-run", {"step": 0})
        ... except hk.CheckpointError as error:
        ...     print(error)
        runs/no-such-run: is not a checkpoint: it has no manifest.json; pass a folder such as step-000001200
    """

    page = "checkpoints"
    _kept = ""  # names from files may have line ends


class CorruptCheckpointError(CheckpointError):
    """The contents of a checkpoint differ from what was saved.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> path = hk.checkpoint.save(hk.broadcast_object(tempfile.mkdtemp()), {"weights": np.ones(3)})
        >>> if hk.is_chief():  # a disk error
        ...     _ = (path / "replicated.safetensors").write_bytes(b"")
        >>> try:
        ...     hk.checkpoint.restore(path, {"weights": np.zeros(3)})
        ... except hk.CorruptCheckpointError as error:
        ...     print(error)
        /.../replicated.safetensors: has 0 bytes, but 152 were written (truncated?)
    """

    page = "checkpoints#the-tools"


class DataError(HvdkitError):
    """A data file is damaged, or has changed or disappeared while it was used.

    Examples:
        >>> import pathlib, tempfile
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> path = pathlib.Path(hk.broadcast_object(tempfile.mkdtemp())) / "clicks.parquet"
        >>> if hk.is_chief():
        ...     _ = path.write_bytes(b"not Parquet")
        >>> hk.barrier()
        >>> try:
        ...     rows = hk.data.parquet(path)
        ... except hk.DataError as error:
        ...     print(error)
        /.../clicks.parquet is not a whole Parquet file: Parquet magic bytes not found in footer...
    """

    page = "data#bad-files"
    _kept = ""  # names from files may have line ends


class PlanError(HvdkitError):
    """No placement of the tables fits the available memory.

    Examples:
        >>> import hvdkit as hk
        >>> try:
        ...     hk.plan_tables([hk.layers.Table("items", 10_000_000, 64)], 4, memory_bytes=500_000_000)
        ... except hk.PlanError as error:
        ...     print(error)
        memory_bytes: got 500,000,000 (476.8 MiB), expected at least ..., which rank 0 of 4 needs; start more ranks, ...
    """

    page = "embeddings#where-tables-go"


class NonFiniteError(HvdkitError):
    """A loss, a gradient or a variable became NaN or infinite.

    The rank exits with code 65 (EX_DATAERR of sysexits.h). ``hvdkit run`` does not restart the job, as the same steps
    would give the same values.

    Attributes:
        exit_code: 65.

    Examples:
        >>> import tempfile
        >>> import tensorflow as tf
        >>> import hvdkit as hk
        >>> cluster = hk.init()
        >>> weights = tf.Variable([1.0, float("nan")], name="weights")
        >>> try:
        ...     hk.checkpoint.save(hk.broadcast_object(tempfile.mkdtemp()), {"weights": weights}, step=7)
        ... except hk.NonFiniteError as error:
        ...     print(error)
        weights: got nan in rows 0 to 1, expected finite numbers, on rank 0 at step 7; this checkpoint is not saved, ...
    """

    exit_code = 65
    page = "supervisor#values-that-are-not-finite"


class BuildError(HvdkitError):
    """Horovod could not be built; the message says what is missing."""

    page = "compatibility"


def describe(argument: str, got: object, expected: str, remedy: str) -> str:
    """Format an error message from argument, got, expected and remedy.

    Example:
        >>> describe("splits", [1, 2], "one entry per rank (4)", "pass 4 row counts")
        'splits: got [1, 2], expected one entry per rank (4); pass 4 row counts'
    """
    shown = got if isinstance(got, str) else repr(got)
    return printable(f"{argument}: got {shown}, expected {expected}; {remedy}")


def counted(number: int, noun: str) -> str:
    """Return a number of things in words.

    Example:
        >>> counted(1, "rank"), counted(2048, "rank")
        ('1 rank', '2,048 ranks')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(items: Sequence[object], most: int, *, separator: str = ", ") -> str:
    """Return the first of some things, and how many more there are.

    Example:
        >>> listed(["a", "b", "c"], 2), listed([1, 2], 2), listed(["x", "y"], 1, separator="; ")
        ('a, b and 1 more', '1, 2', 'x; and 1 more')
    """
    shown = separator.join(map(str, items[:most]))
    more = len(items) - most
    return f"{shown}{separator.rstrip(', ')} and {more} more" if more > 0 else shown


def printable(text: object, *, keep: str = "") -> str:
    r"""Return text with characters that a terminal would interpret, or cannot show, written as escapes.

    Names and texts from files may contain commands for a terminal, line breaks, characters that change the direction of
    the line, or bytes that are not UTF-8. The result can be encoded in any encoding that extends ASCII, if the text's
    letters can.

    Args:
        text: the text, or an object whose ``str()`` is it.
        keep: characters to leave as they are, such as line breaks.

    Example:
        >>> printable("name\x1b]0;title\x07 naïve\n")
        'name\\x1b]0;title\\x07 naïve\\n'
    """
    text = str(text)
    if text.isprintable():
        return text
    # The repr of a character that cannot be printed is its escape in quotes.
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


SEE = "see `hvdkit docs "
"""How a message begins to name a page of the documentation."""


def see(page: str) -> str:
    """Return the end of a message that names a page of the documentation. A test checks that the page exists.

    Example:
        >>> see("launching#hosts")
        'see `hvdkit docs launching#hosts`'
    """
    return f"{SEE}{page}`"


def integer(name: str, value: object, *, minimum: int) -> int:
    """Return ``value`` as an int. Raises TypeError if it is not an integer, ValueError if it is below ``minimum``.

    Example:
        >>> integer("size", 3, minimum=1)
        3
    """
    expected = f"an integer of at least {minimum}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(describe(name, value, expected, "pass an int"))
    if value < minimum:
        raise ValueError(describe(name, value, expected, "raise it"))
    return int(value)
