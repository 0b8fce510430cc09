"""``python -m hvdkit``: the same as the ``hvdkit`` command."""

import sys

from hvdkit.cli import main

sys.exit(main())
