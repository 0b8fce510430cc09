"""Where a save puts its files: a local folder, renamed at the end, or a store, in which the manifest comes last."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.checkpoint import stores
from hvdkit.checkpoint.bounds import manifest_bytes
from hvdkit.checkpoint.files import RunPath, atomic_file, checkpoint_errors, make_folder, read_bounded, remove_folder
from hvdkit.checkpoint.folder import commit, is_good, remove_note, temporary_path
from hvdkit.checkpoint.manifest import NAME, Manifest
from hvdkit.checkpoint.store_folder import files_of, note_recent, report_name, set_aside, sweep
from hvdkit.errors import CheckpointError
from hvdkit.machine.scratch import ScratchFolder

if TYPE_CHECKING:
    from upath import UPath


class LocalFolder:
    """A folder with a temporary name that all ranks share, next to the checkpoint that it becomes.

    Attributes:
        folder: where one rank writes its files first.
        suffix: of the names of its files.
        polls: the shortest and the longest pause between two looks for a report, in seconds.
    """

    suffix = ""
    polls = (0.002, 0.01)

    def __init__(self, target: Path, token: str):
        self.folder = temporary_path(target, token)
        self._target = target

    def prepare(self) -> None:
        """Make the folder. Raises CheckpointError if that fails."""
        make_folder(self.folder)

    def publish(self, name: str) -> None:
        """Bring a file that is complete to where the checkpoint will be: here, it is there."""

    def send_report(self, rank: int, text: str) -> None:
        """Report to the chief that the files of ``rank`` are there."""
        # The chief renames the folder after the last report: from then on it cannot be synced by this name.
        with atomic_file(self._report(rank), "w") as file:
            file.write(text)

    def take_report(self, rank: int) -> tuple[RunPath, bytes] | None:
        """On the chief: return where a rank's report was, and its text; None if there is none yet."""
        path = self._report(rank)
        if not path.exists():
            return None
        data = read_bounded(path, manifest_bytes(1))
        path.unlink()
        return path, data

    def _report(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"

    def commit(self, manifest: Manifest, check: Callable[[], None]) -> None:
        """On the chief: make the checkpoint complete. ``check`` raises to prevent it."""
        manifest.write(self.folder)
        check()
        commit(self.folder, self._target)

    def close(self) -> None:
        """Remove what only this rank needed while it wrote."""

    def discard(self, *, is_chief: bool) -> None:
        """Remove the files of a save that failed, once all ranks have stopped writing."""
        if is_chief:
            remove_folder(self.folder)


class StoreFolder:
    """The same in a store. Each file is written to a temporary local folder, uploaded, and removed there.

    The local copy frees the memory of the snapshot soon, however slow the store is, and can be sent again if a
    connection ends.
    """

    polls = (0.1, 2.0)

    def __init__(self, target: UPath, token: str):
        self.folder = Path(tempfile.gettempdir()) / f"hvdkit-save-{token}"
        self.suffix = ""
        self._scratch: ScratchFolder | None = None
        self._target = target
        self._token = token
        self._published: list[UPath] = []
        self._reports: list[str] = []

    def prepare(self) -> None:
        with checkpoint_errors(self.folder, "written"):
            self._scratch = ScratchFolder("hvdkit-save-")
        self.folder = self._scratch.path
        if stores.exists(self._target / NAME):  # on all ranks: the manifest is replaced after all have reported
            self.suffix = f"-{self._token}"

    def publish(self, name: str) -> None:
        self._published.append(self._target / name)
        stores.upload(self.folder / name, self._target / name)
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def send_report(self, rank: int, text: str) -> None:
        path = self._target / report_name(rank, self._token)
        self._published.append(path)
        stores.write_bytes(path, text.encode())

    def take_report(self, rank: int) -> tuple[RunPath, bytes] | None:
        path = self._target / report_name(rank, self._token)
        data = stores.read_start(path, manifest_bytes(1))
        if data is None:
            return None
        self._reports.append(path.name)
        return path, data

    def commit(self, manifest: Manifest, check: Callable[[], None]) -> None:
        check()
        replaced = files_of(self._target) if self.suffix else []
        if self.suffix and not is_good(self._target):
            set_aside(self._target, self.suffix)
            remove_note(self._target)
        elif not self.suffix:
            remove_note(self._target)  # the user may have removed the checkpoint
        note_recent(self._target)
        manifest.write(self._target)
        self._published.clear()
        with contextlib.suppress(CheckpointError):  # the next session removes them
            sweep(self._target, manifest, [*replaced, *self._reports])

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()

    def discard(self, *, is_chief: bool) -> None:
        with contextlib.suppress(CheckpointError):
            stores.remove(self._published)
