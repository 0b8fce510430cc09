"""A file with the job's token that only its owner can read, at the same path on all hosts of a job."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvdkit.errors import ClusterError
from hvdkit.launch.reach import refusal, ssh_command

# Every host has it, and TMPDIR of this one need not exist on others.
_SHARED_FOLDER = "/tmp"
# The folder has to be new: one that another user has made first could hold another token. If hosts share their /tmp,
# the folder is there already, and only this user can have written the same token into it. The rename lets a host that
# comes second see the whole file or none; it waits for it.
_WRITE = """\
umask 077
if mkdir -m 700 {folder} 2>/dev/null; then cat > {path}.part && exec mv {path}.part {path}; fi
if [ -d {folder} ] && [ ! -L {folder} ] && [ -O {folder} ]; then
    for second in 1 2 3 4 5; do [ -e {path} ] && break; sleep 1; done
    cmp -s - {path} && exit 0
fi
echo "{folder} exists already, and is not of this job" >&2
exit 1
"""
_REMOVE = "[ ! -L {folder} ] && [ -O {folder} ] && rm -rf {folder}; true"


class PrivateFile:
    """A file that only this user can read, in a new folder whose name cannot be guessed, here and on other hosts.

    Args:
        text: its contents.
        others: further hosts to write it on, over ssh.
        ssh_args: arguments for ssh.
        timeout: seconds for each host.

    Attributes:
        path: its path on all hosts.

    Raises:
        ClusterError: it cannot be written on some host, or its folder exists there; it is removed everywhere then.
    """

    def __init__(self, text: str, others: Sequence[str] = (), ssh_args: str = "", timeout: float = 15.0) -> None:
        self._others, self._ssh_args, self._timeout = others, ssh_args, timeout
        try:
            self.path = Path(tempfile.mkdtemp(prefix="hvdkit-run-", dir=_SHARED_FOLDER if others else None)) / "told"
            self.path.touch(mode=0o600, exist_ok=False)
            self.path.write_text(text)
        except OSError as error:
            remedy = "free space there, or set TMPDIR to a folder that this user may write to"
            raise ClusterError(f"hvdkit run cannot write the file with the job's token ({error}); {remedy}") from error
        if problems := self._run_on(others, _WRITE, text):
            self.remove()
            raise ClusterError("\n".join(problems))

    def remove(self, lost: Collection[str] = ()) -> None:
        """Remove it on all hosts except those that are ``lost``."""
        self._run_on([host for host in self._others if host not in lost], _REMOVE, "")
        shutil.rmtree(self.path.parent, ignore_errors=True)

    def _run_on(self, hosts: Sequence[str], script: str, text: str) -> list[str]:
        """Run a script on all hosts at once; return what went wrong."""
        script = script.format(folder=shlex.quote(str(self.path.parent)), path=shlex.quote(str(self.path)))

        def run(host: str) -> str | None:
            command = ssh_command(host, self._ssh_args, self._timeout, ["sh", "-c", script])
            try:
                done = subprocess.run(
                    command, input=text, capture_output=True, text=True, timeout=self._timeout, check=False
                )
            except subprocess.TimeoutExpired:
                return f"host {host}: it does not answer within {self._timeout:g} s"
            except FileNotFoundError:
                return "ssh is not installed on this host; install an OpenSSH client"
            return None if done.returncode == 0 else f"host {host}: {refusal(host, done.returncode, done.stderr)}"

        if not hosts:
            return []
        with ThreadPoolExecutor(min(64, len(hosts))) as pool:
            return [problem for problem in pool.map(run, hosts) if problem]
