"""Entry point of the processes of ``hk.run``: the launcher's, those of the ranks, and the engine of ``hk.ray.run``.

    python .../hvdkit/commands/run/function_process.py launcher FOLDER PID
    python .../hvdkit/commands/run/function_process.py rank
    python .../hvdkit/commands/run/function_process.py ray SPEC

The file is named by its path, so that these processes find the hvdkit of the caller, also if it is not installed.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the process that the command line names."""
    kind, *arguments = sys.argv[1:]
    # In place of the folder of this file, whose modules are not for users.
    path = os.path.realpath(__file__)
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(path))))  # noqa: PTH120
    if kind == "launcher":
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it silently until it starts the job
        from hvdkit.commands.run.run_function import launch

        launch(*arguments)
    elif kind == "ray":
        from hvdkit.commands.run.ray_engine import run_engine

        run_engine(*arguments)
    else:
        from hvdkit.commands.run.function_rank import call_function

        call_function()


if __name__ == "__main__":
    main()
