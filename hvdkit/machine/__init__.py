"""Facts about this host, each read in one place, without any judgement. The lowest layer: depends on psutil only.

cores.py          cores: affinity, CPU quota
memory.py         memory: of the host, and limits
cgroups.py        control groups, which set such limits
interfaces.py     names of the host, network interfaces, their addresses, and the variables that select them
gpus.py           NVIDIA GPUs
mpi.py            MPI launchers, and MPI libraries in this process
environment.py    variables with secrets, and variables of the current job
launcher.py       the launcher: the rank that it assigned, and how to end it
limits.py         limits of this process
terminal.py       whether a user sees this process on a terminal; text tables
processes.py      this boot; processes by PID and start time: their state and activity, and how to end them
subprocesses.py   running commands that may crash or hang
"""
