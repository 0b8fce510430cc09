"""Compile Horovod for the installed TensorFlow.

Horovod's last release is older than the supported TensorFlow versions, so ``pip install horovod`` fails.
:func:`build_horovod` downloads this release, applies the patches that the installed TensorFlow and Python need,
compiles it against one MPI, stores the wheel in the user's cache folder, installs it and checks that it imports. This
package imports neither TensorFlow nor Horovod. Start with build.py; patches.py lists the changes to Horovod.

Example:
    >>> from hvdkit.commands.build_horovod import BuildHorovod, build_horovod
    >>> wheel = build_horovod(BuildHorovod(mpi="wheel", jobs=2))  # doctest: +SKIP
"""

from hvdkit.commands.build_horovod.build import build_horovod
from hvdkit.commands.build_horovod.config import BuildHorovod

__all__ = ["BuildHorovod", "build_horovod"]
