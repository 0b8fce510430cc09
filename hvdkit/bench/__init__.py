"""``hvdkit bench``: how fast a training step is, and where its time goes.

:mod:`hvdkit.bench.workloads` has the steps themselves, for whoever measures something else with them.
"""
