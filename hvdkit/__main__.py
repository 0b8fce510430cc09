"""Run the ``hvdkit`` command as ``python -m hvdkit``."""

import sys

from hvdkit.commands.cli import main

sys.exit(main())
