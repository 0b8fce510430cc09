"""``hvdkit bench``: measure the speed of a training step, and show where its time goes.

:mod:`hvdkit.commands.bench.workloads` provides the training steps for users' own benchmarks.
"""
