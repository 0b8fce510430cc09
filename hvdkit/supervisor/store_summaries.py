"""TensorBoard's event files in an object store, in which nothing can be appended to an object."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.checkpoint import stores
from hvdkit.checkpoint.files import RunPath, checkpoint_errors
from hvdkit.errors import CheckpointError
from hvdkit.supervisor.summaries import Summaries

if TYPE_CHECKING:
    from upath import UPath

_PUBLISH_SECONDS = 60.0


class StoreSummaries(Summaries):
    """Summaries that are written to a temporary local folder, and uploaded each minute and before each checkpoint.

    Args:
        folder: the folder of event files in the store.
        resume_at: as for :class:`Summaries`.

    Raises:
        CheckpointError: the store cannot be read, or the temporary folder cannot be written.
    """

    def __init__(self, folder: UPath, *, resume_at: int | None = None) -> None:
        self._store = folder
        with checkpoint_errors(Path(tempfile.gettempdir()), "written"):
            self._copies = Path(tempfile.mkdtemp(prefix="hvdkit-summaries-"))
        self._sizes: dict[str, int] = {}  # of the files in the store
        self._publishing = threading.Lock()
        self._ended = threading.Event()
        self._download()
        super().__init__(self._copies, resume_at=resume_at)
        self.publish()
        threading.Thread(target=self._publish_often, name="hvdkit-summaries", daemon=True).start()

    def publish(self) -> None:
        """Upload the event files that have changed."""
        with self._publishing:
            for file in sorted(self._copies.glob("events.*")):
                size = file.stat().st_size
                if self._sizes.get(file.name) != size:
                    stores.upload(file, self._store / file.name)
                    self._sizes[file.name] = size

    def close(self) -> None:
        """Close the file, and upload what is left. See :meth:`Summaries.close`."""
        if not self._ended.is_set():
            self._ended.set()
            try:
                super().close()
                self.publish()
            finally:
                shutil.rmtree(self._copies, ignore_errors=True)

    def _download(self) -> None:
        """Fetch the event files of earlier runs, which may have steps that are trained again."""
        for name, size in stores.sizes(self._store).items():
            if size is not None and name.startswith("events."):
                path = self._store / name
                with contextlib.suppress(FileNotFoundError):  # it was removed, and is still listed
                    stores.request(path, "read", path.fs.get_file, path.path, str(self._copies / name))
                    self._sizes[name] = size

    def _publish_often(self) -> None:
        while not self._ended.wait(_PUBLISH_SECONDS):
            try:
                self.publish()
            except (CheckpointError, OSError):
                continue  # the next save reports it


def open_summaries(folder: RunPath, *, resume_at: int) -> Summaries:
    """Return the summaries of a run, local or in a store. See :class:`Summaries`."""
    if isinstance(folder, Path):
        return Summaries(folder, resume_at=resume_at)
    return StoreSummaries(folder, resume_at=resume_at)
