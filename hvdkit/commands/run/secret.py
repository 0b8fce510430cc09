"""A private file with the job's token, at the same path on all hosts of a job."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from hvdkit.commands.run.preflight import Remote, run_on
from hvdkit.errors import ClusterError

# Exists on every host, unlike this host's TMPDIR.
_SHARED_FOLDER = "/tmp"
# The folder must be new: one that another user created could contain another token. If hosts share /tmp, the folder
# already exists on the second host, but only this user can have written the same token. The file is renamed into
# place, so that the second host, which waits for it, never sees an incomplete file.
_WRITE = """\
umask 077
if mkdir -m 700 {folder} 2>/dev/null; then cat > {path}.part && exec mv {path}.part {path}; fi
if [ -d {folder} ] && [ ! -L {folder} ] && [ -O {folder} ]; then
    for second in 1 2 3 4 5; do [ -e {path} ] && break; sleep 1; done
    cmp -s - {path} && exit 0
fi
echo "{folder} already exists, and does not belong to this job" >&2
exit 1
"""
_REMOVE = "[ ! -L {folder} ] && [ -O {folder} ] && rm -rf {folder}; true"


class PrivateFile:
    """A file that only this user can read, in a new folder with an unpredictable name, on this and other hosts.

    Attributes:
        path: path of the file on all hosts.

    Raises:
        ClusterError: a host cannot write the file, or its folder already exists. The file is then removed from all
            hosts.
    """

    def __init__(self, text: str, remote: Remote, others: Sequence[str] = (), timeout: float = 15.0) -> None:
        self._others = others
        self._remote = remote
        self._timeout = timeout
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
        """Remove the file from all hosts except ``lost`` ones."""
        self._run_on([host for host in self._others if host not in lost], _REMOVE, "")
        shutil.rmtree(self.path.parent, ignore_errors=True)

    def _run_on(self, hosts: Sequence[str], script: str, text: str) -> list[str]:
        """Run a script on all hosts concurrently; return the problems."""
        script = script.format(folder=shlex.quote(str(self.path.parent)), path=shlex.quote(str(self.path)))
        replies = run_on(hosts, self._remote, ["sh", "-c", script], text, self._timeout)
        return [f"host {host}: {problem}" for host, (_, problem) in zip(hosts, replies, strict=True) if problem]
