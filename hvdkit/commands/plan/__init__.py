"""``hvdkit plan``: plan the placement of embedding tables, or predict step times on more ranks; starts no job.

The placement is :func:`hvdkit.sharding.plan.plan_tables`. Predictions start from a file written by ``hvdkit tune``:

    command.py       the command, and the parsing of its options
    measurements.py  the file: a model's computation, gradients and timed allreduces
    cost.py          the cost model: from measurements to the seconds of a step on N ranks
    scaling.py       the predicted steps, as a table
"""
