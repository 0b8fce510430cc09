"""Facts about this host, each read in one place; nothing here judges. The lowest layer: it needs psutil only.

subprocesses.py   run a command that may crash or hang
processes.py      processes by number and start time: what they do, and ending them
interfaces.py     network interfaces and their addresses, and the variables that choose among them
"""
