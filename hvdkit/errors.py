"""The errors that hvdkit raises.

Bad arguments raise Python's own ``ValueError`` or ``TypeError``. Everything that
concerns the job as a whole derives from :class:`HvdkitError`, so that a script can
catch all of it in one place.

Every message names the argument, what it got, what was expected and the remedy;
where ranks differ it names the rank. :func:`describe` builds such a message.
"""

from __future__ import annotations


class HvdkitError(RuntimeError):
    """Base class of the errors that concern the job rather than one argument.

    Attributes:
        exit_code: the code with which a rank ends that does not catch the error.
    """

    exit_code: int = 1

    # AutoGraph makes an error that crosses ``tf.function`` anew. It keeps the class where the constructor is
    # Exception's own, and turns every other into a StagingError that nobody can catch by name.
    __init__ = Exception.__init__


class ClusterError(HvdkitError):
    """The world of ranks is not what the launcher, or the caller, asked for."""


class CollectiveMismatchError(HvdkitError):
    """Ranks called different collectives, or the same one with unlike tensors."""


class CheckpointError(HvdkitError):
    """A checkpoint cannot be written, found or restored."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint's bytes are not the bytes that were saved."""


class PlanError(HvdkitError):
    """No placement of the tables fits the memory it was given."""


class NonFiniteError(HvdkitError):
    """A loss, a gradient or a variable became NaN or infinite.

    A rank ends with 65 then (EX_DATAERR of sysexits.h): ``hvdkit run`` does not start again, since the same steps
    would come to the same values.
    """

    exit_code = 65


class BuildError(HvdkitError):
    """Horovod could not be built; the message says what is missing."""


def describe(argument: str, got: object, expected: str, remedy: str) -> str:
    """Return an error message with argument, got, expected and remedy, in that order.

    Example:
        >>> describe("splits", [1, 2], "one entry per rank (4)", "pass 4 row counts")
        'splits: got [1, 2], expected one entry per rank (4); pass 4 row counts'
    """
    shown = got if isinstance(got, str) else repr(got)
    return f"{argument}: got {shown}, expected {expected}; {remedy}"
