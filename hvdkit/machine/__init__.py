"""Facts about this host, each read by one function, without any judgement: what a fact means is up to the callers.

Facts come from the operating system, the environment and a few commands (``mpirun --version``, ``nvidia-smi``). This is
the lowest layer: it depends on psutil only, and the modules that sentinels import use only the standard library. A
``filesystem`` argument lets tests simulate /proc and /sys. Start with launcher.py and cores.py. The modules:

cores.py          cores: affinity, CPU quota
memory.py         memory: of the host, and limits
cgroups.py        control groups, which set such limits
interfaces.py     names of the host, network interfaces, their addresses, and the variables that select them
gpus.py           NVIDIA GPUs
mpi.py            MPI launchers, and MPI libraries in this process
environment.py    variables with secrets, and variables that a launcher sets for its job
launcher.py       the launcher: the rank that it assigned, and how to end it
terminal.py       whether the user sees this process on a terminal; tables with aligned columns
processes.py      this boot; processes by PID and start time: their state and activity, limits, and how to end them
subprocesses.py   running commands that may crash or hang
replacing.py      replacing a file or folder at once
scratch.py        temporary folders, removed even if their process is killed
"""
