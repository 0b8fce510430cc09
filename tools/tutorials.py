"""Execute the tutorials, each in an empty folder, and write their outputs back, or only check that they succeed.

    python tools/tutorials.py                                   # all of docs/tutorials/*.ipynb
    python tools/tutorials.py docs/tutorials/4_kill.ipynb       # one
    python tools/tutorials.py --check                           # write nothing

The Python that runs this also runs the cells: it needs requirements/tutorials.txt. The commands in the cells, such as
`!hvdkit run`, come from the PATH. `make tutorials` sets up both.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode
from PIL import Image
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "tutorials"
SECONDS = 1200  # of one cell; only a command that hangs takes this long, on any machine
LARGEST_IMAGE = 60_000  # bytes
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(notebook: NotebookNode, folder: Path, settings: Path) -> None:
    """Execute the cells of a notebook, and replace their outputs.

    Args:
        notebook: a notebook, which is changed.
        folder: the working directory of the cells.
        settings: folder for the files of Jupyter.

    Raises:
        CellExecutionError: A cell failed.
        CellTimeoutError: A cell did not end.
    """
    # Sockets are files: other users of this machine cannot connect.
    sockets = {"transport": "ipc", "ip": str(settings / "kernel")}
    NotebookClient(
        notebook,
        config=Config({"AsyncKernelManager": sockets}),
        kernel_name="python3",
        startup_timeout=SECONDS,
        timeout=SECONDS,
        resources={"metadata": {"path": str(folder)}},
        coalesce_streams=True,
        record_timing=False,
    ).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream":  # commands run on a pseudo-terminal
                output.text = output.text.replace("\r\n", "\n").replace(f"{folder}/", "")
            elif "image/png" in output.get("data", {}):
                output.data["image/png"] = with_palette(output.data["image/png"])


def with_palette(png: str) -> str:
    """Return an image with at most 256 colors, in base64: a plot takes a third of the bytes."""
    with Image.open(io.BytesIO(base64.b64decode(png))) as image, io.BytesIO() as file:
        image.convert("RGB").quantize(256).save(file, "png", optimize=True)
        return base64.b64encode(file.getvalue()).decode()


def texts(output: NotebookNode) -> Iterator[str]:
    """Yield the texts of an output."""
    if output.output_type == "stream":
        yield output.text
    yield from (data for kind, data in output.get("data", {}).items() if kind.startswith("text/"))


def blemishes(notebook: NotebookNode, private: list[str]) -> list[str]:
    """Return a message for each output that does not belong on a page: control codes, paths, large images."""
    messages = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown = "".join(texts(output))
            found = [text for text in ("\x1b", "\r", *private) if text in shown]
            messages += [f"cell {cell.id}: the output contains {text!r}" for text in found]
            size = len(base64.b64decode(output.get("data", {}).get("image/png", "")))
            if size > LARGEST_IMAGE:
                messages.append(f"cell {cell.id}: an image of {size} bytes, more than {LARGEST_IMAGE}")
    return messages


def tried(path: Path, write: bool) -> list[str]:
    """Execute a notebook in an empty folder; return messages if it fails, otherwise write it."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as settings:
        # Without the user's settings of Jupyter, IPython and matplotlib.
        names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR")
        os.environ |= dict.fromkeys(names, settings)
        os.environ["HVDKIT_FLIGHT_DIR"] = folder
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # TensorFlow's messages depend on the processor
        try:
            execute(notebook, Path(folder), Path(settings))
        except (CellExecutionError, CellTimeoutError) as error:
            return [str(error)]
        messages = blemishes(notebook, [folder, str(ROOT), str(Path.home())])
    if write and not messages:
        nbformat.write(notebook, path)
    return messages


def main() -> int:
    """Execute the notebooks named on the command line, or all; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    failed = 0
    for path in options.notebooks:
        started = time.monotonic()
        messages = tried(path, not options.check)
        print(f"{path.name}: {'failed' if messages else 'ok'}, {time.monotonic() - started:.0f} s", flush=True)
        print("\n".join(messages), end="\n" if messages else "", file=sys.stderr, flush=True)
        failed += bool(messages)
    print(f"{len(options.notebooks)} tutorials, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
