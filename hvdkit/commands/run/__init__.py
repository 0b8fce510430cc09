"""``hvdkit run``: start a job on this machine, on hosts, under Slurm or on Kubernetes, and report how it ended.

An engine, such as mpirun, starts a sentinel for each rank, and the sentinel starts the rank's program. Sentinels are
connected to ``hvdkit run``: output, exit codes and signals travel over these connections for every engine. Modules:

    config.py          the options
    command.py         runs all of the below
    hosts.py           hosts and slots: -H, hostfile, Slurm, PBS; which ranks go where
    reach.py           the check before the start, by ssh or srun, and the network between hosts
    probe.py           what the check runs on each host
    choose.py          the engine: depends on Horovod's build, and on the installed MPI and Slurm
    engines.py         pure: the command line of each engine
    job.py             options, hosts, engine and environment of a job that is ready to start
    attempt.py         one start of the job, to its end: signals, failure, no orphans
    engine_process.py  the engine's process: its output and its end
    secret.py          under Gloo, the file by which sentinels find ``hvdkit run``, private on each host
    output.py          whole lines of all ranks in one stream, and one log per rank
    restarts.py        attempt after attempt: the hosts of the next one, and when it starts
    manifest.py        pure: an MPIJob for Kubernetes
"""
