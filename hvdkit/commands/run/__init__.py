"""``hvdkit run``: starts a job on this machine, on hosts, under Slurm or on Kubernetes, and reports how it ended.

An engine, e.g. mpirun, starts a sentinel for each rank, and the sentinel starts the rank's program. Sentinels connect
to the coordinator in ``hvdkit run``, and transfer output, exit codes and signals over these connections with every
engine. Options and the program come in; the output of all ranks, the last line and an exit code go out. Start reading
with ``command.py``; ``attempt.py`` is the main loop. The modules:

    config.py          the options
    command.py         runs the command
    hosts.py           hosts and slots: -H, hostfile, Slurm, PBS; placement of ranks
    preflight.py       the check before the start, over ssh or srun, and the network between hosts
    host_probe.py      the script that the check runs on each host
    engine_choice.py   chooses the engine, depending on Horovod's build and on the installed MPI and Slurm
    engines.py         pure: the command line of each engine
    job.py             options, hosts, engine and environment of a job that is ready to start
    attempt.py         one start of the job, to its end: signals, failures, no orphans
    engine_process.py  the engine's process: its output and its end
    secret.py          under Gloo, a private file on each host by which sentinels find ``hvdkit run``
    output.py          whole lines of all ranks in one stream, and one log per rank
    restarts.py        repeated attempts: the hosts of the next one, and when it starts
    kubernetes.py      pure: an MPIJob for Kubernetes

``hk.run`` starts a function instead of a program:

    run_function.py       pickles the function, forwards the output, returns the results; its child process, the
                          launcher, starts the job as ``hvdkit run`` does
    function_process.py   entry point of the launcher, of the ranks and of the engine of ``hk.ray.run``
    function_transfer.py  transfers the function to the ranks, and their outcomes back
    function_rank.py      the program of each rank: calls the function

``hk.ray.run`` calls it in the actors of a Ray cluster:

    ray_job.py            reserves resources in the caller's process; a job in the reserved part of a cluster
    ray_engine.py         the engine: starts a sentinel in each actor
"""
