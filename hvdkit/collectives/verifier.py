"""``HVDKIT_CHECK=1``: each rank reports the collectives that it traces into graphs. Off, it costs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf
from tensorflow.python.util import tf_stack

from hvdkit.cluster import checks, failure

_COLLECTION = "hvdkit_trace"
_OURS = str(Path(__file__).resolve().parents[1])
_THEIRS = ("/tensorflow/", "/keras/", "/horovod/", "/autograph_generated", "__autograph_generated", "/contextlib.py")
_traces: Counter[str] = Counter()


def traced(graph: tf.Graph, name: str, tensors: Sequence[tf.Tensor], uneven: bool) -> None:
    """Report a collective of the function that ``graph`` is made for."""
    member = failure.member()
    if member is None or not checks.enabled():
        return
    number = graph.get_collection_ref(_COLLECTION)
    if not number:
        _traces[graph.name] += 1
        number.append(_traces[graph.name])
    shapes = ", ".join(_shown(x, uneven) for x in tensors[:4]) + (f" and {len(tensors) - 4} more" * (len(tensors) > 4))
    member.send("traced", function=graph.name, trace=number[0], what=f"{name} of {shapes}", line=_source_line())


def _shown(x: tf.Tensor, uneven: bool) -> str:
    axes = x.shape.as_list() if x.shape.rank is not None else ["any"]
    if uneven and axes:
        axes[0] = "*"
    return f"{x.dtype.name}[{', '.join('?' if axis is None else str(axis) for axis in axes)}]"


def _source_line() -> str:
    """Return the innermost line outside of hvdkit, TensorFlow and Keras; AutoGraph's own code as it was written."""
    frames = [(frame.filename, frame.lineno) for frame in tf_stack.extract_stack()]
    own = [(file, line) for file, line in frames if not file.startswith(_OURS) and not any(p in file for p in _THEIRS)]
    file, line = (own or frames)[-1]
    return f"{file}:{line}"
