"""What several tests share. pytest's ``pythonpath`` has the folder above, so tests import ``helpers.jobs`` and so on.

speed             timeouts, and the slowdown of this machine
jobs              start a job, or any command
jobs_that_fail    start jobs with a fault, and return how they ended
hosts, slurm      several hosts, and a Slurm cluster, on this machine
as_one, porting   compare N ranks with one process: hk.fit, and whole programs; ports: the text of a port
counting          exchanges, bytes and traces of a step; instructions: Python's
pairwise          parametrize by pairs of values; cases: loop over cases inside one test
traces            check a trace for Perfetto
help_examples     the examples in the help of commands
outcomes          what the ranks of a launch report, merged; for tests/run.py
"""
