"""A short run that test_survival.py disturbs: it prints each step, and writes the whole state at its end.

The arguments are the logdir and a folder for the state of each rank.
"""

import sys
from pathlib import Path

from helpers.supervised import Run

import hvdkit as hk

logdir, results = map(Path, sys.argv[1:])
hk.init()
run = Run(epochs=8)
with run.supervised(logdir, save_steps=3) as sv:
    run.train(sv, on_step=lambda step: print(f"step {step}", flush=True))
    (results / f"rank-{hk.rank()}").write_bytes(b"".join(run.bits()))
print("end", flush=True)
