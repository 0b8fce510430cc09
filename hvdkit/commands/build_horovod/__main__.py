"""``python -m hvdkit.commands.build_horovod``: the command line of this package."""

import sys

import tyro

from hvdkit.commands.build_horovod import BuildHorovod, build_horovod
from hvdkit.errors import BuildError


def main() -> int:
    """Build and install Horovod; return 0, 1 on a build error, or 130 after Ctrl-C."""
    config = tyro.cli(BuildHorovod, prog="python -m hvdkit.commands.build_horovod")
    try:
        print(build_horovod(config))
    except BuildError as error:
        print(f"build-horovod: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build-horovod: stopped; nothing was left in the cache", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
