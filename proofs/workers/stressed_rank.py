"""One rank of proofs/false_alarms.py: hvdkit's own sentinel and reporter, without TensorFlow and MPI.

    python stressed_rank.py FOLDER RANK SIZE STEPS STRESS SEED

Ranks synchronize at every step through files in FOLDER. SEED selects the steps and the rank that applies STRESS.
"""

from __future__ import annotations

import os
import random
import sys
import time
import types
from pathlib import Path

_package = types.ModuleType("hvdkit")  # importing hvdkit itself would load TensorFlow
_package.__path__ = [str(Path(__file__).resolve().parents[2] / "hvdkit")]
sys.modules["hvdkit"] = _package

from hvdkit.machine import processes  # noqa: E402
from hvdkit.machine.launcher import LaunchedRank  # noqa: E402
from hvdkit.watchdog.flight_recorder import recorder  # noqa: E402
from hvdkit.watchdog.reporter import reporter  # noqa: E402
from hvdkit.watchdog.uncaught import uncaught_errors  # noqa: E402

FOLDER, RANK, SIZE, STEPS, STRESS, SEED = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5], int(sys.argv[6])
HEARTBEAT = float(os.environ["HVDKIT_HEARTBEAT_SECONDS"])
_STEP_SECONDS = 0.02


def meet(name: str) -> None:
    """Wait until all ranks have reached this call."""
    (FOLDER / f"{name}-{RANK}").touch()
    while not all((FOLDER / f"{name}-{rank}").exists() for rank in range(SIZE)):
        time.sleep(0.005)


def hold_lock(seconds: float) -> None:
    """Compute without releasing Python's lock."""
    sys.setswitchinterval(1000)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    sys.setswitchinterval(0.005)


def fork_children() -> None:
    """Fork like a data loader; the children exit with different codes."""
    children = []
    for code in (0, 1, 3, 137):
        pid = os.fork()
        if pid == 0:
            if code == 3:
                sys.exit(code)  # runs the inherited exit handlers
            os._exit(code)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def stress() -> None:
    """Apply the stress."""
    if STRESS == "lock":
        hold_lock(2 * HEARTBEAT)
    elif STRESS == "save":
        with reporter().busy("saving"):
            time.sleep(3 * HEARTBEAT)
    elif STRESS == "fork":
        fork_children()
    elif STRESS in ("stop", "debugger", "sentinel killed", "sentinel stopped", "clock"):
        (FOLDER / "act").write_text(str(os.getpid()))  # proofs/false_alarms.py then acts on this rank
    if STRESS == "clock":
        before = time.time()
        time.sleep(3 * HEARTBEAT)
        print(f"the clock went from {before:.0f} to {time.time():.0f}")


def main() -> None:
    """Run the steps of a job without training."""
    world = reporter()
    launched = LaunchedRank(
        launcher="simulated", rank=RANK, size=SIZE, local_rank=RANK, local_size=SIZE, controller="gloo"
    )
    offer = world.begin(launched)
    if RANK == 0:
        (FOLDER / "offer.part").write_text(offer)
        (FOLDER / "offer.part").rename(FOLDER / "offer")
    while not (FOLDER / "offer").exists():
        time.sleep(0.005)
    uncaught_errors().install(RANK, lambda: None, None)
    hosts = [f"host-{rank}" for rank in range(SIZE)]
    world.join(RANK, hosts, [processes.place()] * SIZE, (FOLDER / "offer").read_text(), [], lambda: None)
    chosen = random.Random(SEED)
    at, odd = chosen.randrange(1, STEPS - 1), chosen.randrange(SIZE)
    for step in range(STEPS):
        recorder().at_step(step)
        number = recorder().begin(f"eager {step}", "meet()", f"{__file__}:1", eager=True)
        meet(f"step-{step}")
        recorder().end(number, eager=True)
        if step == at and odd == RANK:
            stress()
        time.sleep(_STEP_SECONDS)
    time.sleep(chosen.random() * 0.2 * RANK)  # ranks end at different times
    world.leave()
    world.await_others()
    world.remove()
    print(f"rank {RANK} has ended", flush=True)


main()
