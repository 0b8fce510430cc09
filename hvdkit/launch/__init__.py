"""``hvdkit run``: start a job on this machine, on hosts, under Slurm or on Kubernetes, and say how it ended.

Existing engines start the ranks; each rank's program runs in a small wrapper that is connected to ``hvdkit run``:
its output, its end and the signals for it travel there, alike under every engine. The way through the package:

    config.py      the options
    command.py     runs all of the below
    hosts.py       hosts and slots: -H, hostfile, Slurm, PBS; which ranks go where
    reach.py       the check before the start, by ssh or srun (probe.py is what runs there); the network between hosts
    secret.py      the file by which wrappers find ``hvdkit run`` under Gloo, private on each host
    choose.py      the engine: what Horovod was built with, which MPI is there, what Slurm can do
    engines.py     pure: the command line of each engine
    manifest.py    pure: an MPIJob for Kubernetes
    attempt.py     one start of the job, to its end: signals, failure, no orphans
    channel.py     the connections of the ranks' wrappers (rank.py)
    output.py      whole lines of all ranks in one stream, and a log for each
    verdict.py     pure: which rank failed first, the exit code, the last line
    restarts.py    attempt after attempt: who takes part in the next, and when
"""
