"""``hvdkit bench``, ``tune`` and ``plan``: measure a training step on some ranks, and predict it on more.

``bench`` and ``tune`` start jobs in which each rank measures one of the built-in workloads. The chief prints the
measurements of all ranks as one line, which the command reads. In the order of the data:

    config.py        the options of ``bench`` and ``tune``, which become a request
    jobs.py          starts a job that measures, and returns the measurements of its ranks
    worker.py        one rank of the job
    workloads.py     its training steps, also for users' own benchmarks
    measurements.py  the request, the measurement of a rank, and the file that ``tune`` saves
    bench.py         ``bench``: the jobs of all rounds and their results, or the profile of a program
    tune.py          ``tune``: compares settings, and saves the best with the measurements
    planning.py      ``plan``: the placement of tables, or steps predicted from the saved file; starts no job
    cost.py          the cost model: from measurements to the seconds of a step on N ranks, and their table
"""
