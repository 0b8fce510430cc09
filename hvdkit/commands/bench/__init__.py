"""``hvdkit bench`` and ``hvdkit tune``: measure the speed of a training step, and show where its time goes.

Both commands start jobs in which each rank measures one of the built-in workloads; the chief prints the results of all
ranks as one line, which the command reads. Start with command.py (``bench``) and tune.py (``tune``):

    config.py       the options of ``bench``, and those that both commands share
    command.py      ``bench``: starts the jobs and collects the results
    worker.py       one rank of ``bench``
    figures.py      the results of ``bench``, as a table and as JSON
    tune.py         ``tune``: compares settings, and saves the best with the measurements
    tune_worker.py  one rank of ``tune``
    workloads.py    the training steps, also for users' own benchmarks
"""
