"""A file with the job's token that only its owner can read, at the same path on all hosts of a job."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from hvdkit.commands.run.reach import Remote, run_on
from hvdkit.errors import ClusterError

# Every host has this folder; the TMPDIR of this host may not exist on others.
_SHARED_FOLDER = "/tmp"
# The folder must be new: one that another user made first could hold another token. If hosts share their /tmp, the
# folder exists on the second host, and only this user can have written the same token into it. Because the file is
# renamed, the second host, which waits for it, sees the whole file or none.
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
        remote: runs commands on other hosts.
        others: further hosts to write it on.
        timeout: seconds for each host.

    Attributes:
        path: its path on all hosts.

    Raises:
        ClusterError: a host cannot write it, or has its folder already; it is then removed from all hosts.
    """

    def __init__(self, text: str, remote: Remote, others: Sequence[str] = (), timeout: float = 15.0) -> None:
        self._others, self._remote, self._timeout = others, remote, timeout
        try:
            self.path = Path(tempfile.mkdtemp(prefix="hvdkit-run-", dir=_SHARED_FOLDER if others else None)) / "offer"
            self.path.touch(mode=0o600, exist_ok=False)
            self.path.write_text(text)
        except OSError as error:
            remedy = "free space there, or set TMPDIR to a folder that this user may write to"
            raise ClusterError(f"hvdkit run cannot write the file with the job's token ({error}); {remedy}") from error
        if problems := self._run_on(others, _WRITE, text):
            self.remove()
            raise ClusterError("\n".join(problems))

    def remove(self, lost: Collection[str] = ()) -> None:
        """Remove it from all hosts except those that are ``lost``."""
        self._run_on([host for host in self._others if host not in lost], _REMOVE, "")
        shutil.rmtree(self.path.parent, ignore_errors=True)

    def _run_on(self, hosts: Sequence[str], script: str, text: str) -> list[str]:
        """Run a script on all hosts at once; return what went wrong."""
        script = script.format(folder=shlex.quote(str(self.path.parent)), path=shlex.quote(str(self.path)))
        replies = run_on(hosts, self._remote, ["sh", "-c", script], text, self._timeout)
        return [f"host {host}: {problem}" for host, (_, problem) in zip(hosts, replies, strict=True) if problem]
