"""Limits of what is read from a checkpoint, so that a file with wrong contents costs seconds and little memory.

A length, count or size in a file is only a claim. Everything that is read is bounded by the real size of a file and by
these limits; what is written is held to them, too. They are far above what a checkpoint of thousands of ranks needs.
"""

from __future__ import annotations

MANIFEST_BYTES = 32 * 2**20
"""Largest manifest, plus :data:`MANIFEST_BYTES_PER_FILE` for each file in its folder: there is one for each rank."""
MANIFEST_BYTES_PER_FILE = 2**20
HEADER_BYTES = 100_000_000
"""Largest header of a tensor file; the limit of the safetensors package."""
NOTE_BYTES = 2**14
"""Bytes that are read of a note about damage."""
RANKS = 2**20
"""Largest number of ranks that a manifest may name."""
DIMENSIONS = 32
"""Most axes of a tensor; the limit of older versions of NumPy."""
TOTAL_BYTES = 2**62
"""Most bytes of a file or of a whole tensor, so that sums fit into 64 bits."""
STEPS = 10**18
"""Steps are below this number: they have at most 18 digits."""
NAME_LENGTH = 4096
"""Most characters of the name of a tensor or a value."""
TEXT_LENGTH = 200
"""Most characters of other text, e.g. a partition rule or a version."""
JSON_VALUES = 2**21
"""Most opening brackets in JSON, plus one for each :data:`BYTES_PER_JSON_VALUE` bytes: an array takes 60 bytes."""
BYTES_PER_JSON_VALUE = 16
DEPTH = 100
"""Deepest nesting of a plain value; Python's own limit is 1,000 frames."""


def most_files(entries: int) -> int:
    """Return how many files a manifest may name in a folder with ``entries`` entries; some may be missing.

    It bounds the comparison of parts with each other, which can take time in proportion to the square of their number.

    Example:
        >>> most_files(6)
        1012
    """
    return 1000 + 2 * entries


def manifest_bytes(files: int) -> int:
    """Return the largest size of a manifest in a folder of ``files`` files.

    Example:
        >>> manifest_bytes(4096) // 2**20
        4128
    """
    return MANIFEST_BYTES + files * MANIFEST_BYTES_PER_FILE
