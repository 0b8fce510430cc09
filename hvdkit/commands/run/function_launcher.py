"""The launcher of ``hk.run``: starts the job in a separate process, without the caller's threads and children.

The folder has the options and the function, and gets the outcomes and the verdict.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path

from hvdkit.commands.run.command import start
from hvdkit.commands.run.config import RunConfig
from hvdkit.commands.run.engines import function_process
from hvdkit.commands.run.function_transfer import FunctionServer
from hvdkit.commands.run.job import prepare
from hvdkit.commands.run.ray_job import RayReservation, on_ray
from hvdkit.errors import HvdkitError
from hvdkit.machine import processes
from hvdkit.watchdog.verdict import Verdict

CONFIG = "config"
CALL = "call"
VERDICT = "verdict"


def launch(name: str, caller: str) -> None:
    """Run the job of a folder, and write its verdict, or the error that prevented its start.

    Args:
        name: the folder.
        caller: PID of the process that called ``hk.run``, with which the job ends.
    """
    processes.signal_at_parent_end(signal.SIGTERM)
    if os.getppid() != int(caller):
        return
    folder = Path(name)
    config: RunConfig
    reservation: RayReservation | None
    config, reservation = pickle.loads((folder / CONFIG).read_bytes())
    program = list(function_process("rank"))
    end: Verdict | Exception
    try:
        job = prepare(config, program)
        if reservation is not None:
            job = on_ray(job, reservation)
        end = start(replace(job, function=FunctionServer(folder / CALL, folder)), program)
    except (ValueError, HvdkitError) as error:
        end = error
    if os.getppid() == int(caller):
        (folder / VERDICT).write_bytes(pickle.dumps(end))
    else:  # it was killed, and will not remove the folder
        shutil.rmtree(folder, ignore_errors=True)
