"""Facts about this host, each read in one place; nothing here judges. The lowest layer: it needs psutil only.

cores.py          cores: affinity, CPU quota
memory.py         memory: the host's, limits
cgroups.py        the control groups that set such limits
host.py           names of the host
interfaces.py     network interfaces, their addresses, and the variables that choose among them
gpus.py           NVIDIA's GPUs
mpi.py            launchers of MPI, and its libraries in this process
environment.py    variables that hold secrets, and those of a job that this process is in
launcher.py       the launcher: the rank that it assigned, and its end
limits.py         limits of this process
processes.py      processes by number and start time: what they do, and ending them
subprocesses.py   running a command that may crash or hang
"""
