"""Faults of disks: damaged and forged bytes, and limits under which system calls fail as on a full disk."""

from __future__ import annotations

import contextlib
import json
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash


def flip(file: Path, at: int = -3) -> None:
    """Flip one bit of the byte at offset ``at``; a second call repairs it."""
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


@contextlib.contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Lower a limit of this process, e.g. ``resource.RLIMIT_FSIZE`` for the length of files it writes."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's manifest, and set the checksum that it would have been written with."""
    content = json.loads((path / "manifest.json").read_text())
    del content["checksum"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = xxhash.xxh3_128_hexdigest(text.encode())
    (path / "manifest.json").write_text(json.dumps(content))


def rewritten(path: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a checkpoint's tensor file, and set the checksums that it would have been written with."""
    file = path / name
    content = file.read_bytes()
    (count,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + count])
    change(entries)
    text = json.dumps(entries).encode()
    header = struct.pack("<Q", len(text)) + text
    file.write_bytes(header + content[8 + count :])
    record = {"bytes": file.stat().st_size, "checksum": xxhash.xxh3_128_hexdigest(header)}
    edited(path, lambda manifest: manifest["files"].update({name: record}))
