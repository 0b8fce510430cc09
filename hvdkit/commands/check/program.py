"""One rank of ``hvdkit check``: run a script with a fixed seed, as its own main program.

    python -m hvdkit.commands.check.program train.py --lr 1

``hk.fit`` in the script records its steps, as an environment variable requests, and ends the script.
"""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path

import numpy as np

from hvdkit.cluster.tensorflow_loading import load_tensorflow

SEED = 0


def main() -> None:
    """Run the script that is named on the command line, with its arguments."""
    load_tensorflow()
    import tensorflow as tf

    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    random.seed(SEED)  # keras.utils.set_random_seed, without importing Keras before hk.init()
    np.random.seed(SEED)
    tf.random.set_seed(SEED)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
