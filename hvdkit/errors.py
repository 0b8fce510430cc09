"""The errors that hvdkit raises.

Invalid arguments raise ``ValueError`` or ``TypeError``. Errors of the job as a whole derive from :class:`HvdkitError`,
so that user scripts can catch them in one place.

Every message contains the argument, the actual value, the expected value and the remedy; if ranks differ, it names the
rank. :func:`describe` formats such a message; :func:`see` names a page of the documentation; :func:`integer`
checks an argument.
"""

from __future__ import annotations

import numbers


class HvdkitError(RuntimeError):
    """Base class of errors that concern the job rather than an argument.

    Attributes:
        exit_code: the exit code of a rank that does not catch the error.
        page: the page of the documentation about such errors, ``PAGE`` or ``PAGE#SECTION``. A report of an uncaught
            error ends with it.
    """

    exit_code: int = 1
    page: str | None = None

    # AutoGraph recreates errors that leave a ``tf.function``. It only keeps the class if the constructor is that of
    # Exception; otherwise it raises a StagingError, which callers cannot catch by name.
    __init__ = Exception.__init__


class ClusterError(HvdkitError):
    """The ranks are not set up as the launcher or the caller requested."""

    page = "launching"


class CollectiveMismatchError(HvdkitError):
    """Ranks called different collectives, or the same collective with incompatible tensors."""

    page = "collectives#errors"


class CheckpointError(HvdkitError):
    """A checkpoint cannot be written, found or restored."""

    page = "checkpoints"


class CorruptCheckpointError(CheckpointError):
    """The contents of a checkpoint differ from what was saved."""

    page = "checkpoints#the-tools"


class DataError(HvdkitError):
    """A data file is damaged, or has changed or disappeared while it was used."""

    page = "data#bad-files"


class PlanError(HvdkitError):
    """No placement of the tables fits the available memory."""

    page = "embeddings#where-tables-go"


class NonFiniteError(HvdkitError):
    """A loss, a gradient or a variable became NaN or infinite.

    The rank exits with code 65 (EX_DATAERR of sysexits.h). ``hvdkit run`` does not restart the job, as the same steps
    would give the same values.
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
    return f"{argument}: got {shown}, expected {expected}; {remedy}"


def see(page: str) -> str:
    """Return the end of a message that names a page of the documentation. A test checks that the page exists.

    Example:
        >>> see("launching#hosts")
        'see `hvdkit docs launching#hosts`'
    """
    return f"see `hvdkit docs {page}`"


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
