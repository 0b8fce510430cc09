"""``hk.check_step`` and ``hvdkit check``: the first training steps of all ranks, compared with those of one process.

step_check.py       runs the steps within a program; the command runs the whole program, once on each number of ranks
step_recording.py   records what the steps compute, as step_records.py keeps it
step_comparison.py  decides which values differ, and explains why
check_result.py     the table of verdicts
"""
