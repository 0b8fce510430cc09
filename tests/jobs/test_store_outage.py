"""A store that is down for five minutes while two ranks train: no step and no checkpoint is lost."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time

import pytest
from helpers.jobs import MPI, environment
from helpers.object_store import BUCKET, served

import hvdkit as hk

OUTAGE = 300.0  # seconds
RUN = f"s3://{BUCKET}/run"
LONGEST_GAP = 60.0  # seconds; on an idle machine less than one
PROGRAM = f"""
import json, os, time
from pathlib import Path
import numpy as np
import hvdkit as hk

hk.init()
table = hk.PartitionedVariable((1000, 8), name="table", initializer="zeros")
ended = []
with hk.Supervisor("{RUN}", state={{"table": table}}, save_model_secs=10, max_to_keep=None, summary_steps=5) as sv:
    while not sv.should_stop():
        table.apply(lambda local: local + 1)
        time.sleep(0.1)
        sv.step(loss=1 / (1 + sv.global_step))
        ended.append(time.time())
        if hk.is_chief() and ended[-1] - ended[0] > {OUTAGE} + 60:
            sv.request_stop()
assert np.all(table.local.numpy() == sv.global_step)
if hk.is_chief():
    Path(os.environ["ENDED"]).write_text(json.dumps(ended))
"""
RESTORE = f"""
import numpy as np
import hvdkit as hk

hk.init()
path = hk.checkpoint.latest("{RUN}")
table = hk.PartitionedVariable((1000, 8), name="table", initializer="zeros")
hk.checkpoint.restore(path, {{"state": {{"table": table}}}})
assert np.all(table.local.numpy() == int(path.name[5:])), table.local
"""


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_store_that_is_down_for_five_minutes_costs_no_step_and_no_checkpoint(tmp_path):
    down = threading.Event()
    refused: list[float] = []  # times of requests

    def fault(request):
        if down.is_set():
            refused.append(time.time())
            return "refuse"
        if request.method == "PUT" and "shard-00001" in request.key and "step-000000" in request.key and not refused:
            saves.append(request.key)
            if len(saves) == 2:  # in the middle of the second save
                refused.append(time.time())
                down.set()
                threading.Timer(OUTAGE, down.clear).start()
                return "refuse"
        return None

    saves: list[str] = []
    with served() as store:
        store.fault = fault
        command = [*MPI, "2", sys.executable, "-c", PROGRAM]
        env = environment(ENDED=str(tmp_path / "ended"), **store.environment)
        done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=1500, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        ended = json.loads((tmp_path / "ended").read_text())
        began = refused[0]
        during = [number for number, when in enumerate(ended, 1) if began < when < began + OUTAGE]
        gaps = [after - before for before, after in itertools.pairwise(ended)]
        checkpoints = [int(found.path.name[5:]) for found in hk.checkpoint.inspect(RUN).checkpoints]
        print(f"{len(refused)} requests refused in {refused[-1] - began:.0f} s; {len(during)} steps meanwhile;")
        print(f"longest step {max(gaps):.2f} s; checkpoints {checkpoints}; steps {len(ended)}")
        assert refused[-1] - began > 0.8 * OUTAGE
        assert len(during) > OUTAGE / 10
        assert max(gaps) < LONGEST_GAP
        assert int(saves[1].split("/")[-2][5:]) in checkpoints  # the save that the outage interrupted
        assert checkpoints[-1] == len(ended)
        assert any(during[-1] < step < len(ended) for step in checkpoints)  # saves go on
        assert hk.checkpoint.verify(RUN).checkpoints == len(checkpoints)
        restored = subprocess.run([*MPI, "2", sys.executable, "-c", RESTORE], env=env, timeout=300, check=False)
        assert restored.returncode == 0
